# What every run script shares: settings, then `launch FLAGS...` from the head to the job's end.
#
#   PLAN=1      print the memory plan of the same flags (slime plan) and start nothing
#   DRY_RUN=1   print the flags, one word per line, and start nothing
#   DIRECT=1    python3 train.py here, without a Ray cluster
#   RAY_ADDRESS=http://HEAD:8265   submit to a cluster that runs already
#   otherwise   start a Ray head here, workers by HOSTFILE over ssh, submit, end what was started;
#               without HOSTFILE print what to type on the other nodes, and wait for them
#
# Settings (environment): BASE_DIR MASTER_ADDR NUM_NODES GPUS_PER_NODE HOSTFILE SSH_USER JOIN_BY_HAND
# RAY_PORT DASHBOARD_PORT DASHBOARD_HOST RUNTIME_ENV_VARS SKIP_PLAN; see docs/scaling.md.
LIB_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)
ROOT=$(cd -- "$LIB_DIR/../.." && pwd)
for part in say network nccl token ray_start head workers submit; do source "$LIB_DIR/$part.sh"; done

settings() {  # defaults of a script: nodes, GPUs of each
    NUM_NODES=${NUM_NODES:-$1}
    GPUS_PER_NODE=${GPUS_PER_NODE:-$2}
    BASE_DIR=${BASE_DIR:-/root}
    MASTER_ADDR=${MASTER_ADDR:-${MLP_WORKER_0_HOST:-}}
    RAY_PORT=${RAY_PORT:-6379}
    DASHBOARD_PORT=${DASHBOARD_PORT:-8265}
    local name
    for name in NUM_NODES GPUS_PER_NODE RAY_PORT DASHBOARD_PORT; do
        [[ ${!name} =~ ^[1-9][0-9]*$ ]] || refuse "$name must be a whole number above 0, not '${!name}'"
    done
    refuse_secrets
    [[ -n ${HOSTFILE:-} || ! -e $BASE_DIR/mpi_hostfile ]] || HOSTFILE=$BASE_DIR/mpi_hostfile
    HOSTFILE=${HOSTFILE:-}
    # Without a GPU each "GPU" of the flags is a CPU process, and Ray is told of none.
    RAY_GPUS=${RAY_GPUS:-$(if has_gpus; then echo "$GPUS_PER_NODE"; else echo 0; fi)}
    CLUSTER_ARGS=(--actor-num-nodes "$NUM_NODES" --actor-num-gpus-per-node "$GPUS_PER_NODE" --num-gpus-per-node "$GPUS_PER_NODE")
}

has_gpus() { command -v nvidia-smi >/dev/null || [[ -e /dev/nvidiactl ]]; }

find_python() {  # python3 with slime's packages: the one of PATH, or else of `make venv`
    [[ -z ${PYTHON:-} ]] || return 0
    PYTHON=$(command -v python3 || echo python3)
    if "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("ray") is None)' 2>/dev/null; then return 0; fi
    [[ -x $ROOT/.venv/bin/python ]] || refuse "$PYTHON has not what slime needs: type make venv in $ROOT, or activate the environment slime is installed in"
    PYTHON=$ROOT/.venv/bin/python PATH=$PATH:$ROOT/.venv/bin
}

launch() {
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    if [[ -n ${DRY_RUN:-} ]]; then
        printf '%q\n' "$@"
        return
    fi
    find_python
    if [[ -n ${PLAN:-} ]]; then
        exec "$PYTHON" -m slime.cli plan --gpus $((NUM_NODES * GPUS_PER_NODE)) "$@"
    else
        check_folders "$@"
        check_plan "$@"
        nccl_defaults
        if [[ -n ${DIRECT:-} ]]; then exec "$PYTHON" "$ROOT/train.py" "$@"; fi
        on_cluster "$@"
    fi
}

on_cluster() {
    LAUNCH_DIR=$(mktemp -d "${TMPDIR:-/tmp}/slime-launch.XXXXXX")
    STARTED=() HEAD_PID='' JOB='' CHOSEN_INTERFACES=()
    local name status=0
    for name in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME; do
        [[ -z ${!name:-} ]] || CHOSEN_INTERFACES+=("$name")
    done
    command -v ray >/dev/null || refuse "the command ray is missing: activate the environment slime is installed in"
    ensure_token
    trap clean_up EXIT
    trap 'stop_job; exit 130' INT
    trap 'stop_job; exit 143' TERM
    if [[ -n ${RAY_ADDRESS:-} ]]; then check_address; else start_cluster; fi
    ((NUM_NODES == 1)) || wait_for_nodes
    submit "$@" || status=$?
    exit $status
}

start_cluster() {
    ((NUM_NODES > 1)) || MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
    [[ -n $MASTER_ADDR ]] || refuse "MASTER_ADDR is missing: set it to the address of this machine that the other $((NUM_NODES - 1)) nodes reach it at"
    export MASTER_ADDR
    # On one node nobody else needs the dashboard; on several it is reached from the others, with the token.
    DASHBOARD_HOST=${DASHBOARD_HOST:-$([[ $NUM_NODES -gt 1 ]] && echo 0.0.0.0 || echo "$MASTER_ADDR")}
    # Without a hostfile the user starts Ray on the other nodes.
    ((NUM_NODES == 1)) || [[ -n $HOSTFILE ]] || JOIN_BY_HAND=1
    [[ -n ${JOIN_BY_HAND:-} ]] || read_hosts
    detect_network "$MASTER_ADDR"
    start_head
    if [[ -n ${JOIN_BY_HAND:-} ]]; then how_to_join; else start_workers; fi
}

clean_up() {
    local status=$?
    trap - INT TERM
    stop_workers
    stop_head
    ((status == 0)) || say "what Ray and the workers said is in $LAUNCH_DIR"
    ((status != 0)) || rm -rf "$LAUNCH_DIR"
}

check_folders() {  # of the flags that name what must exist already
    local word previous=''
    for word in "$@"; do
        case $previous in
            --hf-checkpoint) [[ -r $word/config.json ]] || refuse "--hf-checkpoint $word is not a folder of a Hugging Face model: download it there$(base_dir "$word")" ;;
            --ref-load) [[ -d $word ]] || refuse "--ref-load $word does not exist: make it with tools/convert_hf_to_torch_dist.py$(base_dir "$word")" ;;
            --prompt-data) [[ $word == *:* || -e ${word%%@*} ]] || refuse "--prompt-data $word does not exist: download it$(base_dir "$word")" ;;
        esac
        previous=$word
    done
}

base_dir() { [[ $1 != "$BASE_DIR"/* ]] || echo ", or set BASE_DIR (now $BASE_DIR)"; }

check_plan() {  # before anything starts; minutes of loading later it would fail anyway
    [[ -z ${SKIP_PLAN:-} ]] || return 0
    local status=0 plan
    plan=$("$PYTHON" -m slime.cli plan --gpus $((NUM_NODES * GPUS_PER_NODE)) "$@" 2>&1) || status=$?
    ((status != 0)) || return 0
    echo "$plan" >&2
    ((status == 2)) && exit 2
    refuse "the plan above does not fit; SKIP_PLAN=1 starts the job all the same"
}
