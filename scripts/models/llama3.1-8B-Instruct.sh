# Llama-3.1-8B-Instruct
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.1-8B.sh"
