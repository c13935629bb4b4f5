# The head of every examples/NAME/run.sh: the model is the first word, the folder's hooks are importable.
# It trains here (python3 train.py); RAY_ADDRESS=http://HEAD:8265 submits it to a cluster instead.
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"

example() {  # folder of the example, then the words of the command line
    HERE=$1 MODEL=${2:-}
    [[ -n $MODEL ]] || refuse "which model? type: bash examples/${HERE##*/}/run.sh /path/to/a/huggingface/model"
    settings 1 1
    [[ -n ${RAY_ADDRESS:-} ]] || DIRECT=1
    SKIP_PLAN=${SKIP_PLAN-1}
    JOB_NAME=${HERE##*/}
    export PYTHONPATH=$HERE${PYTHONPATH:+:$PYTHONPATH}
}
