# DeepSeek-V3.1 (671B, 37B active): the layers of DeepSeek-V3, published in FP8 with scales that are powers of two
source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
