#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns to add with adapters of rank 16, on one GPU that engine and trainer share:
#
#   BASE_DIR=/root bash examples/lora/addition.sh [more flags of train.py]
#
# Model, data and the other flags are those of scripts/run-smollm2-135M.sh, which says where the model comes from.
set -euo pipefail
ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
export RUN_DIR="${RUN_DIR:-${BASE_DIR:-/root}/smollm2-addition-lora}"
exec bash "${ROOT}/scripts/run-smollm2-135M.sh" \
    --lora-rank 16 --lora-alpha 32 --lora-target-modules all-linear \
    --lr 3e-4 --num-rollout 60 --save-hf "${RUN_DIR}/adapter" "$@"
