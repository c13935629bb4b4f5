#!/usr/bin/env bash
# Everything that needs a GPU, one after another on one card, each with a time limit of its own:
#
#   bash benchmarks/all_gpu.sh OUT [NAME...]
#
# OUT/NAME.txt is what each printed; a table with status and seconds comes last. Without names all run.
# TRL_PATH and SGLANG_PATH name folders of packages that hold trl and sglang; MODEL a folder of
# SmolLM2-135M-Instruct (tools/convert_gguf_to_hf.py). What needs one that does not exist is left out.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
OUT=${1:?"which folder for the results? bash benchmarks/all_gpu.sh OUT [NAME...]"}
shift
WANTED=("$@")
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$OUT"
TABLE=()

measure() {  # name, limit in seconds, command
    local name=$1 limit=$2 status=0 start=$SECONDS
    shift 2
    [[ ${#WANTED[@]} -eq 0 || " ${WANTED[*]} " == *" $name "* ]] || return 0
    { date -u '+%Y-%m-%d %H:%M UTC'; echo "\$ $*"; } >"$OUT/$name.txt"
    timeout "$limit" "$@" >>"$OUT/$name.txt" 2>&1 || status=$?
    TABLE+=("$(printf '%-14s status %-4s %4d s   %s' "$name" "$status" $((SECONDS - start)) "$(tail -n 1 "$OUT/$name.txt" | cut -c1-90)")")
    echo "${TABLE[-1]}"
}

measure tests 240 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu
measure weight_sync 90 "$PYTHON" benchmarks/weight_sync_gpu.py
measure step 200 "$PYTHON" benchmarks/step_gpu.py ${TRL_PATH:+--trl-path "$TRL_PATH"}
[[ -z ${MODEL:-} ]] || measure smollm2 600 env BASE_DIR="$OUT" RUN_DIR="$OUT/run" bash scripts/run-smollm2-135M.sh
measure colocate 200 "$PYTHON" benchmarks/colocate_gpu.py ${MODEL:+--model "$MODEL"}
measure engine 200 "$PYTHON" benchmarks/engine_gpu.py --prefix ${SGLANG_PATH:+--sglang-path "$SGLANG_PATH"}
measure engine_4b 120 "$PYTHON" benchmarks/engine_gpu.py --shape 4b --rounds 1
measure engine_moe 150 "$PYTHON" benchmarks/engine_gpu.py --shape 30b-a3b --layers 12 --rounds 1 --start-limit 100
measure train 300 env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$PYTHON" benchmarks/train_gpu.py
measure train_moe 150 env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$PYTHON" benchmarks/train_gpu.py --shapes 30B-A3B-4L
[[ ! -e benchmarks/plan_gpu.py ]] || measure plan 150 "$PYTHON" benchmarks/plan_gpu.py
printf '\n'
printf '%s\n' "${TABLE[@]}"
