"""What this machine has, found out without importing torch."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from slime.config.env import read_env
from slime.utils.machine import gpus, package_version


@cache
def count_gpus() -> int:
    """CUDA GPUs this process may use; 0 where torch was built without CUDA."""
    if (package_version("torch") or "").endswith("+cpu"):
        return 0
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
    """By the driver's files, which costs nothing; by the driver's tool where they do not agree."""
    files = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return files if files == devices else len(gpus()) or devices
