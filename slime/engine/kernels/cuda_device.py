"""What the GPU allows kernels: an early launch (triton_launch.py), and how much shared memory."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools

import torch
import triton

_HOPPER = 9
_HOPPERS_SHARED_MEMORY = 227 << 10


def early_launch() -> dict[str, bool]:
    """Arguments of a launch, for kernels that know what to do with it."""
    return {"EARLY": True, "launch_pdl": True} if _launches_early() else {"EARLY": False}


@functools.cache
def shared_memory() -> int:
    """Bytes that one program can have."""
    if not _on_gpu():
        return _HOPPERS_SHARED_MEMORY
    utils = triton.runtime.driver.active.utils
    return utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"]


@functools.cache
def _launches_early() -> bool:
    return _on_gpu() and torch.cuda.get_device_capability()[0] >= _HOPPER


def _on_gpu() -> bool:
    """And not in Triton's interpreter."""
    return torch.cuda.is_available() and not triton.knobs.runtime.interpret
