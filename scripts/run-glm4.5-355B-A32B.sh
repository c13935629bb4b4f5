#!/usr/bin/env bash
# GLM-4.5-355B-A32B by GRPO on 8 nodes x 8 H100, trainer and engines on the same GPUs; run it on node 0:
#
#   BASE_DIR=/shared MASTER_ADDR=10.0.0.1 bash scripts/run-glm4.5-355B-A32B.sh [more flags of train.py]
#
# With a hostfile (HOSTFILE, or $BASE_DIR/mpi_hostfile) it starts Ray on the other nodes over ssh. Without
# one it prints what to type there, and waits for them.
# FP8=1 generates from the FP8 checkpoint that tools/convert_hf_to_fp8.py makes. PLAN=1 only plans.
# docs/scaling.md has the steps before it: download, conversion, data.
set -euo pipefail
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/lib/launch.sh"
source "${SCRIPT_DIR}/models/glm4.5-355B-A32B.sh"
settings 8 8

MODEL="${BASE_DIR}/GLM-4.5-355B-A32B"
CKPT_ARGS=(
    --hf-checkpoint "${MODEL}${FP8:+-FP8}"
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
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
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
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
)

SGLANG_ARGS=(
    --rollout-engine sglang
    --rollout-num-gpus-per-engine 32
    --sglang-mem-fraction-static 0.7
    --sglang-enable-dp-attention
)
if [[ -n ${FP8:-} ]]; then
    SGLANG_ARGS+=(
        --sglang-dp-size 32
        --sglang-ep-size 32
        --sglang-moe-dense-tp-size 1
        --sglang-enable-dp-lm-head
        --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 128)
        --sglang-moe-a2a-backend deepep
        --sglang-deepep-mode auto
    )
else
    SGLANG_ARGS+=(--sglang-dp-size 4)
fi

MISC_ARGS=(
    --bf16
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
    --moe-enable-deepep
    --moe-token-dispatcher-type flex
)

WANDB_ARGS=()
if [[ -n ${WANDB_API_KEY:-} ]]; then
    WANDB_ARGS=(--use-wandb --wandb-project slime-large-scale --wandb-group glm45-355b)
fi

JOB_NAME=glm4.5-355B-A32B
launch "${CLUSTER_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" \
    "${WANDB_ARGS[@]}" "$@"
