#!/usr/bin/env bash
# Qwen3-4B by GRPO on one machine with 8 GPUs of 80 GB, trainer and engines on the same GPUs:
#
#   BASE_DIR=/root bash scripts/run-qwen3-4B.sh [more flags of train.py]
#
# GPUS_PER_NODE=4 takes half of them, PLAN=1 only plans. docs/scaling.md has the steps before it.
set -euo pipefail
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"
settings 1 8

MODEL="${BASE_DIR}/Qwen3-4B"
CKPT_ARGS=(
    --hf-checkpoint "${MODEL}"
    --ref-load "${MODEL}_torch_dist"
    --load "${MODEL}_slime"
    --save "${MODEL}_slime"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "${BASE_DIR}/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "${BASE_DIR}/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 1
)

PERF_ARGS=(
    --colocate
    --tensor-model-parallel-size 2
    --sequence-parallel
    --max-tokens-per-gpu 9216
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)

SGLANG_ARGS=(
    --rollout-engine sglang
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

MISC_ARGS=(
    --bf16
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

WANDB_ARGS=()
if [[ -n ${WANDB_API_KEY:-} ]]; then
    WANDB_ARGS=(--use-wandb --wandb-project slime --wandb-group qwen3-4B)
fi

JOB_NAME=qwen3-4B
launch "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" \
    "${WANDB_ARGS[@]}" "$@"
