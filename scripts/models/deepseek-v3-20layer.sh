# The first 20 layers of DeepSeek-V3, for tests
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
MODEL_ARGS+=(--num-layers 20 --moe-layer-freq "[0]*3+[1]*17")
