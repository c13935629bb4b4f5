# Llama-3.2-3B-Instruct; nothing differs on AMD
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.2-3B.sh"
