#!/usr/bin/env bash
# The quickstart's task learned with adapters of rank 8, on a CPU in minutes:
#
#   bash examples/lora/sorting.sh [FOLDER [more flags of train.py]]
#
# The quickstart writes the data, warms the model up and trains all of its weights; the same warm-up is then trained with LoRA.
set -euo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
FOLDER=${1:-runs/lora-sorting}
PYTHON=${PYTHON:-python3}

[[ -e ${FOLDER}/grpo/hf ]] || "${PYTHON}" -m slime.cli quickstart --run-dir "${FOLDER}"

"${PYTHON}" -m slime.cli train \
    --train-backend fsdp --rollout-engine slime --actor-num-gpus-per-node 1 \
    --hf-checkpoint "${FOLDER}/warmup/hf" \
    --lora-rank 8 --lora-alpha 16 --lora-target-modules all-linear \
    --run-dir "${FOLDER}/lora" --save-hf "${FOLDER}/lora/adapter" \
    --prompt-data "${FOLDER}/data/train.jsonl" --input-key prompt --label-key answer \
    --apply-chat-template --rollout-shuffle \
    --custom-rm-path slime.cli.quickstart_task.reward \
    --eval-prompt-data sorting "${FOLDER}/data/heldout.jsonl" --eval-interval 5 \
    --num-rollout 50 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8 \
    --advantage-estimator grpo \
    --lr 1e-3 --lr-decay-style constant --adam-beta2 0.95 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    "${@:2}"

"${PYTHON}" "${HERE}/curve.py" "${FOLDER}/curve.svg" "all weights=${FOLDER}/grpo" "LoRA, rank 8=${FOLDER}/lora"
