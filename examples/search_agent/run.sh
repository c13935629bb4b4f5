#!/usr/bin/env bash
# bash examples/search_agent/run.sh /path/to/a/huggingface/model [more flags of train.py]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=$1
shift
export PYTHONPATH="$here:$here/../..${PYTHONPATH:+:$PYTHONPATH}"
exec python3 "$here/../../train.py" \
  --train-backend fsdp \
  --hf-checkpoint "$model" \
  --prompt-data "$here/train.jsonl" --input-key prompt --label-key label --rollout-shuffle \
  --apply-chat-template \
  --custom-generate-function-path search_agent.generate \
  --custom-rm-path search_agent.reward \
  --num-rollout 200 --rollout-batch-size 16 --n-samples-per-prompt 8 \
  --rollout-max-response-len 1024 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
  --lr 1e-6 \
  "$@"
