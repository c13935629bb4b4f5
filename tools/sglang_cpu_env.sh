#!/usr/bin/env bash
# Makes a virtual environment with the real SGLang for machines without a GPU, for tests of slime
# against it: tools/sglang_cpu_env.sh [FOLDER] [PYTHON]
#   tools/sglang_cpu_env.sh                       build/sglang-cpu, about 3 GB and four minutes
#   SLIME_SGLANG_PYTHON=build/sglang-cpu/bin/python slime train --rollout-engine sglang ...
#
# SGLang pins a torch built for CUDA, so it is installed without its dependencies beside pinned ones;
# sitecustomize.py stands in for the two packages of it that exist for GPUs only.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/build/sglang-cpu}
base=${2:-python3.11}
pins=$root/tools/sglang_cpu/requirements.txt
cpu_index=https://download.pytorch.org/whl/cpu
needed_gb=6

free_gb=$(df --output=avail -BG "$(dirname "$folder")" 2>/dev/null | tail -1 | tr -dc 0-9 || true)
if [ -n "$free_gb" ] && [ "$free_gb" -lt "$needed_gb" ] && [ ! -e "$folder/.installed" ]; then
    echo "$folder needs $needed_gb GB while it is installed, $free_gb GB are free" >&2
    exit 1
fi
[ -x "$folder/bin/python" ] || "$base" -m venv "$folder"
python=$folder/bin/python
install() { "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }

if ! cmp -s "$pins" "$folder/.installed"; then
    echo "Installing SGLang for the CPU into $folder."
    torch=$(sed -n 's/^torch==//p' "$pins")
    install "torch==$torch" 2>/dev/null || install --extra-index-url "$cpu_index" "torch==$torch"
    install --requirement "$pins"
fi
cp "$root/tools/sglang_cpu/sitecustomize.py" "$("$python" -c 'import site; print(site.getsitepackages()[0])')"
cp "$pins" "$folder/.installed"
