# Ray on the other nodes, which a hostfile names (one per line, as MPI has it: ADDRESS slots=8).

read_hosts() {  # into HOSTS: the workers, without the head
    HOSTS=()
    ((NUM_NODES > 1)) || return 0
    [[ -f $HOSTFILE && -r $HOSTFILE ]] || refuse "HOSTFILE $HOSTFILE does not exist: write one node per line (ADDRESS slots=8), or set JOIN_BY_HAND=1 to start Ray on the others yourself"
    local host head
    head=$(numeric_address "$MASTER_ADDR") || refuse "MASTER_ADDR $MASTER_ADDR is a name that $(uname -n) does not know: give the address of this machine"
    while read -r host _ || [[ -n $host ]]; do  # the last line may have no end
        [[ -z $host || $host == \#* || $host == "$MASTER_ADDR" || " ${HOSTS[*]} " == *" $host "* || $(numeric_address "$host") == "$head" ]] || HOSTS+=("$host")
    done < <(tr -d '\r' <"$HOSTFILE")
    ((${#HOSTS[@]} >= NUM_NODES - 1)) || refuse "HOSTFILE $HOSTFILE names ${#HOSTS[@]} nodes besides the head, this job needs $((NUM_NODES - 1)): add the missing ones, or lower NUM_NODES"
    HOSTS=("${HOSTS[@]:0:NUM_NODES-1}")
}

start_workers() {
    local host failed=()
    declare -A running=()
    for host in "${HOSTS[@]}"; do
        say "starting Ray on $host"
        on_worker "$host" start >"$LAUNCH_DIR/worker-$host.log" 2>&1 &
        running[$host]=$!
        STARTED+=("$host")
    done
    for host in "${HOSTS[@]}"; do
        wait "${running[$host]}" || failed+=("$host")
    done
    ((${#failed[@]} == 0)) || refuse "$(worker_refusal "${failed[@]}")"
}

stop_workers() {
    local host
    for host in "${STARTED[@]}"; do
        on_worker "$host" stop >>"$LAUNCH_DIR/worker-$host.log" 2>&1 &
    done
    wait_for_jobs_but_head
    STARTED=()
}

# The program and the token go through the connection: a command line can be read by everybody.
on_worker() {  # host, start|stop
    worker_program "$@" | ssh -o BatchMode=yes -o ConnectTimeout=10 "${SSH_USER:-root}@$1" bash -s
}

worker_program() {
    local name
    for name in MASTER_ADDR RAY_PORT RAY_GPUS RAY_AUTH_MODE RAY_START_ARGS $(own_choices); do
        printf 'export %s=%q\n' "$name" "${!name:-}"
    done
    printf 'HOST=%q TASK=%q TOKEN=%q RAY_FOLDER=%q\n' "$1" "$2" "$(read_token)" "$(dirname "$(command -v ray)")"
    cat "$LIB_DIR"/{say,network,ray_start,worker}.sh
}

own_choices() {  # interfaces the user named hold for every node
    local name
    for name in "${CHOSEN_INTERFACES[@]}"; do echo "$name"; done
}

worker_refusal() {
    local host=$1 others=""
    (($# == 1)) || others=" (and $(($# - 1)) more)"
    if grep -q "ssh: \|Permission denied\|Host key verification" "$LAUNCH_DIR/worker-$host.log"; then
        echo "$host$others of $HOSTFILE cannot be reached: $(last_line "$LAUNCH_DIR/worker-$host.log"); ssh ${SSH_USER:-root}@$host must work without a password (SSH_USER changes the user)"
    else
        echo "Ray did not start on $host$others: $(last_line "$LAUNCH_DIR/worker-$host.log"); all of it is in $LAUNCH_DIR/worker-$host.log"
    fi
}

wait_for_jobs_but_head() {
    local job
    for job in $(jobs -p); do
        [[ $job == "${HEAD_PID:-}" ]] || wait "$job" 2>/dev/null || true
    done
}

how_to_join() {
    say "waiting for Ray on the other $((NUM_NODES - 1)) nodes. On each of them type, the first line only once:"
    {
        if [[ $RAY_AUTH_MODE == token && -n ${RAY_AUTH_TOKEN:-} ]]; then
            echo "    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...   # the value it has here"
        elif [[ $RAY_AUTH_MODE == token ]]; then
            echo "    mkdir -p ~/.ray && scp ${SSH_USER:-root}@$MASTER_ADDR:$(token_place) ~/.ray/auth_token && export RAY_AUTH_MODE=token"
        fi
        echo "    ray start --address=$MASTER_ADDR:$RAY_PORT --num-gpus $RAY_GPUS --node-ip-address \${WORKER_IP} --disable-usage-stats"
    } >&2
}

token_place() { [[ -n ${RAY_AUTH_TOKEN:-} ]] && echo "RAY_AUTH_TOKEN" || echo "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"; }

wait_for_nodes() {
    local deadline=$((SECONDS + ${JOIN_TIMEOUT_S:-1800})) joined=0 before=-1
    while joined=$(count_nodes) && ((joined < NUM_NODES)); do
        ((joined == before)) || say "$joined of $NUM_NODES nodes have joined"
        before=$joined
        ((SECONDS < deadline)) || refuse "only $joined of $NUM_NODES nodes joined within ${JOIN_TIMEOUT_S:-1800} s: see which are missing with: ray list nodes --address $RAY_ADDRESS"
        sleep 2
    done
}

count_nodes() { ray list nodes --address "$RAY_ADDRESS" --filter state=ALIVE --limit 10000 2>/dev/null | grep -c ALIVE || true; }
