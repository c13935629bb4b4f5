"""The one place that decides whether this process computes on CUDA or on the CPU.

Torch is imported where it is used: processes that only place others start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def current_device() -> torch.device:
    import torch

    if device_type() == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_id() -> str:
    """A name that is equal in two processes exactly when they share a device's memory."""
    import torch

    if device_type() == "cuda":
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return "cpu"


def collective_backend() -> str:
    return "nccl" if device_type() == "cuda" else "gloo"


def synchronize() -> None:
    import torch

    if device_type() == "cuda":
        torch.cuda.synchronize()
