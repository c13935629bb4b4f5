# Kimi-K2-Thinking: Kimi-K2 for 256k tokens. Published in INT4; --hf-checkpoint is a bf16 or FP8 copy
source "$(dirname -- "${BASH_SOURCE[0]}")/kimi-k2.sh"
MODEL_ARGS+=(--norm-epsilon 1e-5 --rotary-scaling-factor 64)
