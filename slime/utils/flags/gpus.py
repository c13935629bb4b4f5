"""What this machine has, found out without importing torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
from functools import cache
from pathlib import Path

from slime.utils.env import read_env


@cache
def count_gpus() -> int:
    """CUDA GPUs this process may use; 0 where torch was built without CUDA."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        pass
    return visible_gpus(present=_count_present(), visible=read_env().cuda_visible_devices)


def visible_gpus(*, present: int, visible: str | None) -> int:
    """How many of the GPUs that are there CUDA_VISIBLE_DEVICES leaves."""
    if visible is None:
        return present
    named = [part.strip() for part in visible.split(",")]
    if "-1" in named:  # CUDA ignores what stands behind a -1
        named = named[: named.index("-1")]
    return min(present, len([part for part in named if part]))


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _count_present() -> int:
    counts = [
        len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        len(list(Path("/dev").glob("nvidia[0-9]*"))),
    ]
    if all(counts):
        return min(counts)
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("UUID: GPU-") if listed.returncode == 0 else 0
