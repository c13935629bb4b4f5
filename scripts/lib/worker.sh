# What runs on a worker node: Ray started and joined, or what was started before ended, by its own id.
# Before it in the same stream stand HOST, TASK, TOKEN and the settings of the head.
SAID_BY=$HOST
umask 077
mkdir -p ~/.ray
state=~/.ray/slime-${MASTER_ADDR//[^A-Za-z0-9.]/_}-${HOST//[^A-Za-z0-9.]/_}

end_started() {  # Ray that an earlier start left; the id alone could be somebody else's by now
    local pid
    [[ -r $state.pid ]] && pid=$(<"$state.pid") || return 0
    if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "ray start .*--address=$MASTER_ADDR:$RAY_PORT"; then
        kill "$pid"
        for _ in $(seq 100); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.2
        done
    fi
    rm -f "$state.pid" "$state.token"
}

join() {
    [[ ! -x $RAY_FOLDER/ray ]] || PATH=$RAY_FOLDER:$PATH
    command -v ray >/dev/null || refuse "the command ray is missing: install what the head has, at the same place or on PATH"
    detect_network "$MASTER_ADDR"
    ! has_address "$HOST" || SLIME_HOST_IP=$HOST
    # Ray itself would try for minutes.
    timeout 10 bash -c "exec 3<>/dev/tcp/$MASTER_ADDR/$RAY_PORT" 2>/dev/null ||
        refuse "the head at $MASTER_ADDR:$RAY_PORT does not answer from here: open that port between the nodes, or correct MASTER_ADDR"
    printf '%s' "$TOKEN" >"$state.token"
    export RAY_AUTH_TOKEN_PATH=$state.token
    ray_start_words worker "$SLIME_HOST_IP"
    setsid nohup "${WORDS[@]}" >"$state.log" 2>&1 </dev/null &
    echo $! >"$state.pid"
    local deadline=$((SECONDS + 180))
    until grep -q "Ray runtime started" "$state.log"; do
        ((SECONDS < deadline)) || refuse "Ray did not join within 180 s: see $state.log there"
        kill -0 "$(<"$state.pid")" 2>/dev/null || {
            grep -v '^[[:space:]]*$' "$state.log" | tail -n 5
            exit 1
        }
        sleep 0.3
    done
}

has_address() { [[ -n $(ip -o addr show to "$1" 2>/dev/null) ]]; }

end_started
[[ $TASK == stop ]] || join
