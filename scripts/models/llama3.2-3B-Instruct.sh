# Llama-3.2-3B-Instruct
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.2-3B.sh"
