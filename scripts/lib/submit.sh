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
    wait "$SUBMIT_PID" || status=$?
    JOB=
    return $status
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
}
