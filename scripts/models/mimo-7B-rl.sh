# MiMo-7B-RL
source "$(dirname -- "${BASH_SOURCE[0]}")/mimo-7B.sh"
