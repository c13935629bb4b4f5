#!/usr/bin/env bash
# bash examples/tool_agent/run.sh /path/to/a/huggingface/model [more flags of train.py]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)" "$@"
launch \
  --train-backend fsdp \
  --hf-checkpoint "$MODEL" \
  --prompt-data "$HERE/train.jsonl" --input-key prompt --label-key label --rollout-shuffle \
  --apply-chat-template \
  --custom-generate-function-path tool_agent.generate \
  --rm-type math \
  --num-rollout 200 --rollout-batch-size 16 --n-samples-per-prompt 8 \
  --rollout-max-response-len 1024 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
  --lr 1e-6 \
  "${@:2}"
