#!/usr/bin/env bash
# A small Qwen3-VL learns to count squares in pictures, on a CPU in minutes:
#
#   bash examples/vision/run.sh [more flags of slime train]
#
# Held-out pictures are evaluated as they are (counting) and with the squares removed (blank).
set -euo pipefail
ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
DATA="${DATA:-runs/counting}"
RUN_DIR="${RUN_DIR:-runs/counting-grpo}"
[ -d "${DATA}/model" ] || python "${ROOT}/examples/vision/counting.py" "${DATA}"
cd "${ROOT}"
exec slime train --train-backend fsdp --rollout-engine slime --actor-num-gpus-per-node 1 \
    --run-dir "${RUN_DIR}" --hf-checkpoint "${DATA}/model" \
    --prompt-data "${DATA}/train.jsonl" --input-key prompt --label-key label \
    --multimodal-keys '{"image": "images"}' --apply-chat-template --rollout-shuffle \
    --custom-rm-path examples.vision.counting.reward \
    --eval-prompt-data counting "${DATA}/heldout.jsonl" blank "${DATA}/blank.jsonl" --eval-interval 20 \
    --num-rollout 60 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 4 \
    --no-freeze-vision-tower --lr 5e-4 --lr-decay-style constant --adam-beta2 0.95 \
    --use-dynamic-batch-size --max-tokens-per-gpu 4096 "$@"
