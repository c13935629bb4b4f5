"""Facts about this machine and what is installed on it, read without importing anything heavy."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "slime",
    "torch",
    "transformers",
    "ray",
    "numpy",
    "safetensors",
    "sglang",
    "megatron-core",
    "transformer-engine",
    "triton",
)


@dataclass(kw_only=True, frozen=True)
class Gpu:
    name: str
    memory_mib: int
    driver: str


def package_version(name: str) -> str | None:
    """The installed version by the package's own record; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs the driver reports. Asking the driver's tool leaves no CUDA context behind."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=name,memory.total,driver_version"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in reply.stdout.splitlines() if line.count(", ") == 2]
    return [Gpu(name=name, memory_mib=int(mib), driver=driver) for name, mib, driver in rows]


def git_commit(folder: Path) -> str | None:
    """The commit of the checkout `folder` lies in, with "+changes" if files differ from it."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "-uno") else commit


def describe_machine() -> dict[str, object]:
    """What environment.json records about where a run took place."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: v for name in PACKAGES if (v := package_version(name))},
        "gpus": [asdict(gpu) for gpu in gpus()],
        "git_commit": git_commit(Path(__file__).parent),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        reply = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return reply.stdout.strip() if reply.returncode == 0 else None
