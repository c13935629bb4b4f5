# A job of the Ray cluster at RAY_ADDRESS: the command, its environment, and what becomes of it.

submit() {  # the command line of train.py
    local status=0 environment=$LAUNCH_DIR/runtime_env.json
    JOB=${JOB_NAME:-slime}-$(date +%Y%m%d-%H%M%S)-$$
    # In a file: a command line can be read by everybody.
    (umask 077 && write_runtime_env $(job_variables) >"$environment")
    say "Ray dashboard: $RAY_ADDRESS (it asks for the token: $(token_place)); job $JOB"
    accepts_jobs
    ray job submit --address="$RAY_ADDRESS" --submission-id "$JOB" --runtime-env "$environment" -- "$PYTHON" "$ROOT/train.py" "$@" &
    SUBMIT_PID=$!
    watch_head "$SUBMIT_PID" >/dev/null 2>&1 &
    WATCH_PID=$!
    wait "$SUBMIT_PID" || status=$?
    kill "$WATCH_PID" 2>/dev/null && wait "$WATCH_PID" 2>/dev/null || true
    JOB=
    ((status == 0)) || dashboard_answers || say_head_is_gone "$@"
    return $status
}

check_address() {  # of a cluster that runs already
    [[ $RAY_ADDRESS =~ ^https?:// ]] || refuse "RAY_ADDRESS $RAY_ADDRESS is not the address of a dashboard: give http://HEAD:$DASHBOARD_PORT, or unset it to start a cluster"
    local deadline=$((SECONDS + ${HEAD_START_S:-5}))
    until dashboard_answers; do
        ((SECONDS < deadline)) || refuse "RAY_ADDRESS $RAY_ADDRESS does not answer: is Ray running there, with --dashboard-host=0.0.0.0? Unset it to start a cluster"
        sleep 1
    done
}

watch_head() {  # ends the process that follows the job's output: a host that is off closes no connection
    local missed=0
    trap 'kill $!; exit' TERM
    while ((missed < 3)); do
        sleep "${HEAD_CHECK_S:-20}" &
        wait $!
        if dashboard_answers; then missed=0; else ((missed += 1)); fi
    done
    kill "$1"
}

dashboard_answers() {
    [[ $RAY_ADDRESS =~ ^http://([^/:]+):([0-9]+) ]] || return 0
    timeout 5 bash -c "exec 3<>/dev/tcp/${BASH_REMATCH[1]}/${BASH_REMATCH[2]}" 2>/dev/null
}

say_head_is_gone() {  # the command line of train.py
    say "the Ray head at $RAY_ADDRESS died or cannot be reached, and the job ended with it. $(how_to_continue "$@")"
}

how_to_continue() {
    "$PYTHON" -S -c 'import argparse, sys
from slime.runlog.checkpoint_folder import how_to_continue
parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
parser.add_argument("--save")
parser.add_argument("--load")
flags, _ = parser.parse_known_args(sys.argv[1:])
print(how_to_continue(flags.save, flags.load))' "$@"
}

write_runtime_env() {
    "$PYTHON" -c 'import json, os, sys
print(json.dumps({"env_vars": {n: os.environ[n] for n in sys.argv[1:] if n in os.environ}}, indent=1))' "$@"
}

accepts_jobs() {  # a head that has just started has no agent for some seconds
    local deadline=$((SECONDS + 120))
    until ray job list --address="$RAY_ADDRESS" >"$LAUNCH_DIR/jobs.log" 2>&1; do
        ((SECONDS < deadline)) || refuse "the Ray cluster at $RAY_ADDRESS takes no job: $(last_line "$LAUNCH_DIR/jobs.log")"
        sleep 1
    done
}

stop_job() {  # on a signal: the run saves its checkpoint and ends
    [[ -n ${JOB:-} ]] || return 0
    say "stopping job $JOB; a checkpoint is saved if the run has --save"
    ray job stop --address="$RAY_ADDRESS" "$JOB" >&2 || true
    wait "${SUBMIT_PID:-}" 2>/dev/null || true
    kill "${WATCH_PID:-}" 2>/dev/null || true
}
