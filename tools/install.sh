#!/usr/bin/env bash
# Installs slime, editable, with pinned versions and hashes: tools/install.sh PYTHON [EXTRAS]
#   tools/install.sh .venv/bin/python             what the quickstart needs
#   tools/install.sh .venv/bin/python dev,wandb   with extras of pyproject.toml
#
# The one rule for torch: a machine with an NVIDIA GPU gets the CUDA build, which is what PyPI has;
# any other machine gets the CPU build, a tenth of the size. SLIME_TORCH=installed keeps the one that is there.
set -euo pipefail

python=${1:?usage: tools/install.sh PYTHON [EXTRAS]}
extras=${2:-}
root=$(cd "$(dirname "$0")/.." && pwd)
torch_version=$(sed -n 's/^torch==//p' "$root/constraints.txt")
cpu_index=https://download.pytorch.org/whl/cpu

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

has_nvidia_gpu() {
    [ -n "$(ls -A /proc/driver/nvidia/gpus 2>/dev/null)" ] && return
    command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU
}

# The lines of requirements.lock that any of these extras needs.
locked_lines() {
    awk -v wanted="$1" '
        BEGIN { count = split(wanted, names, ","); for (i = 1; i <= count; i++) want[names[i]] }
        /^# / { keep = 0; count = split($2, users, ","); for (i = 1; i <= count; i++) if (users[i] in want) keep = 1; next }
        keep' "$root/requirements.lock"
}

if [ "$(uname -s)" != Linux ]; then
    echo "slime runs on Linux; on Windows use WSL2, on macOS a Linux virtual machine or container." >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "slime needs Python 3.10 or newer; choose another with: make PYTHON=python3.12 ..." >&2
    exit 1
fi

if [ "${SLIME_TORCH:-}" = installed ]; then
    "$python" -c 'import torch' || { echo "SLIME_TORCH=installed, but $python has no torch" >&2; exit 1; }
elif has_nvidia_gpu; then
    echo "An NVIDIA GPU is here: installing torch $torch_version for CUDA."
    pip_install --constraint "$root/constraints.txt" "torch==$torch_version"
else
    echo "No NVIDIA GPU is here: installing torch $torch_version for the CPU."
    # The configured index first: a mirror may carry the CPU build, and PyPI answers at once that it
    # does not.
    pip_install --no-deps --only-binary :all: "torch==$torch_version+cpu" 2>/dev/null ||
        pip_install --no-deps --only-binary :all: --extra-index-url "$cpu_index" \
            "torch==$torch_version+cpu"
fi
echo "Installing slime${extras:+ with $extras}."
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
locked_lines "base,$extras" >"$wanted"
pip_install --require-hashes --no-deps --requirement "$wanted"
# What the lock does not hold (SGLang) is resolved here; nothing is left to do otherwise.
pip_install --constraint "$root/constraints.txt" --no-build-isolation \
    --editable "$root${extras:+[$extras]}"
# With all cores, unlike pip; a file that does not compile, such as a template, is left to its user.
packages=$("$python" -c 'import sysconfig; print(*{sysconfig.get_path(kind) for kind in ("purelib", "platlib")}, sep="\n")')
echo "$packages" | xargs -d '\n' "$python" -m compileall -qq -j 0 || true
