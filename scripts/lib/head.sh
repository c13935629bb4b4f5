# The head of a Ray cluster on this machine, as a child of this script, which ends it.

start_head() {
    is_here "$MASTER_ADDR" || refuse "MASTER_ADDR $MASTER_ADDR is no address of this machine ($(uname -n)): run this on that machine, or correct it"
    ! answers "$MASTER_ADDR" "$RAY_PORT" || refuse "port $RAY_PORT of $MASTER_ADDR is taken, by a Ray head that runs already: submit to it with RAY_ADDRESS=http://$MASTER_ADDR:$DASHBOARD_PORT, or end it with: ray stop"
    ! answers "$MASTER_ADDR" "$DASHBOARD_PORT" || refuse "port $DASHBOARD_PORT of $MASTER_ADDR is taken: choose another one for the dashboard with DASHBOARD_PORT"
    ray_start_words head "$MASTER_ADDR"
    "${WORDS[@]}" >"$LAUNCH_DIR/ray-head.log" 2>&1 </dev/null &
    HEAD_PID=$!
    wait_for_head
    RAY_ADDRESS=http://$MASTER_ADDR:$DASHBOARD_PORT
    export RAY_ADDRESS
}

wait_for_head() {
    local deadline=$((SECONDS + 180))
    until answers "$MASTER_ADDR" "$DASHBOARD_PORT" && grep -q "Ray runtime started" "$LAUNCH_DIR/ray-head.log"; do
        kill -0 "$HEAD_PID" 2>/dev/null || refuse "Ray did not start; $LAUNCH_DIR/ray-head.log ends with: $(last_line "$LAUNCH_DIR/ray-head.log")"
        ((SECONDS < deadline)) || refuse "Ray did not start within 180 s: see $LAUNCH_DIR/ray-head.log"
        sleep 0.5
    done
}

stop_head() {
    [[ -n ${HEAD_PID:-} ]] || return 0
    kill "$HEAD_PID" 2>/dev/null || true
    wait "$HEAD_PID" 2>/dev/null || true
    HEAD_PID=
}

is_here() {
    local address
    address=$(numeric_address "$1") || return 1
    [[ $address == 127.* || $address == ::1 || -n $(interface_of "$address") ]]
}

answers() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

last_line() {  # what a log ends with: its last error, or else its last words
    local text
    text=$(tr -d '\r' <"$1" | grep -v '^[[:space:]]*$')
    grep -E '^[A-Za-z_.]*(Error|Exception|error):' <<<"$text" | tail -n 1 | grep . || tail -n 1 <<<"$text"
}
