"""Whether this process computes on CUDA or on the CPU; decided only here.

Torch is imported inside functions: processes that only start others start faster without it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.env import read_env

if TYPE_CHECKING:
    import torch

_chosen: torch.device | None = None


def device_type() -> str:
    if not _may_have_gpu():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@lru_cache
def _may_have_gpu() -> bool:
    """Return False for a torch built without CUDA and ROCm, read from its files without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    text = (Path(spec.origin).parent / "version.py").read_text()
    return re.search(r"^(cuda|hip)\b.*=\s*'", text, re.MULTILINE) is not None


def current_device() -> torch.device:
    import torch

    if _chosen is not None:
        return _chosen
    if device_type() == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Make `current_device` return this one inside the `with`: models are counted on the meta device."""
    global _chosen
    before, _chosen = _chosen, device
    try:
        yield
    finally:
        _chosen = before


def device_id() -> str:
    """Return a name that is equal in two processes exactly when they share a device's memory."""
    if device_type() == "cuda":
        import torch

        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return f"cpu-{_boot_id()}" if read_env().several_nodes else "cpu"


def _boot_id() -> str:
    """Identify the running kernel: the same in all containers of a machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def collective_backend() -> str:
    return "nccl" if device_type() == "cuda" else "gloo"
