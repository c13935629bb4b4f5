# The command that starts Ray on a node, into WORDS; it stays in the foreground and ends what it started.
ray_start_words() {  # head|worker, the node's address
    WORDS=(ray start --block --disable-usage-stats --node-ip-address "$2")
    ((RAY_GPUS == 0)) || WORDS+=(--num-gpus "$RAY_GPUS")
    if [[ $1 == head ]]; then
        WORDS+=(--head --port "$RAY_PORT" --include-dashboard=true)
        WORDS+=(--dashboard-host="$DASHBOARD_HOST" --dashboard-port="$DASHBOARD_PORT")
        # A stopped job has time to save its checkpoint.
        export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-600}
    else
        WORDS+=("--address=$MASTER_ADDR:$RAY_PORT")
    fi
    WORDS+=(${RAY_START_ARGS:-})
}
