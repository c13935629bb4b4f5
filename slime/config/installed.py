"""What is installed on this machine: GPUs, packages, and the SGLang that engines are started with.

Nothing here imports torch or SGLang.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slime.config.env import read_env
from slime.core.errors import ConfigError
from slime.utils.machine import gpus, package_version

_PRINT_VERSION = "from importlib import metadata; print(metadata.version('sglang'))"
_TIMEOUT_S = 60


@cache
def count_gpus() -> int:
    """Return the number of CUDA GPUs this process may use; 0 if torch was built without CUDA."""
    if (package_version("torch") or "").endswith("+cpu"):
        return 0
    return visible_gpus(present=_count_present(), visible=read_env().cuda_visible_devices)


def visible_gpus(*, present: int, visible: str | None) -> int:
    """Return how many of the present GPUs CUDA_VISIBLE_DEVICES leaves visible."""
    if visible is None:
        return present
    named = [part.strip() for part in visible.split(",")]
    if "-1" in named:  # CUDA ignores everything after a -1
        named = named[: named.index("-1")]
    return min(present, len([part for part in named if part]))


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _count_present() -> int:
    """Count the driver's files, which is fast; run nvidia-smi if they disagree."""
    files = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return files if files == devices else len(gpus()) or devices


@cache
def has_package(python: str, package: str) -> bool:
    """Return whether another interpreter has a package."""
    code = "import importlib.util as u, sys; raise SystemExit(u.find_spec(sys.argv[1]) is None)"
    return subprocess.run([python, "-c", code, package]).returncode == 0


@dataclass(kw_only=True, frozen=True)
class SGLangInstall:
    python: str  # the interpreter to start servers with
    version: str


def find_sglang() -> SGLangInstall | None:
    """Return the SGLang of SLIME_SGLANG_PYTHON if that is set, else this interpreter's, or None."""
    return _find(read_env().sglang_python)


@cache
def _find(python: str | None) -> SGLangInstall | None:
    if not python:
        version = package_version("sglang")
        return (version and SGLangInstall(python=sys.executable, version=version)) or None
    try:
        reply = subprocess.run(
            [python, "-c", _PRINT_VERSION],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"SLIME_SGLANG_PYTHON={python} is not a Python with SGLang: install it there, or unset the "
            "variable"
        ) from error
    return SGLangInstall(python=python, version=reply.stdout.strip())
