"""How the Triton kernels are launched: tile sizes, shared memory, and programmatic dependent launch (PDL).

With PDL a kernel allows the launch of the next kernel immediately, then waits until all earlier kernels have
finished, so that launch latency overlaps with their work. A kernel launched with PDL must call `pdl_wait` in
every program before it accesses memory that other kernels write or read; weights may be prefetched earlier.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9
_HOPPER_SHARED_MEMORY = 227 << 10


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """The tile of a matmul that one program computes, and its pipeline: compile options of a kernel."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


def pdl_options() -> dict[str, bool]:
    """Return the launch arguments that enable PDL where the GPU supports it."""
    return {"PDL": True, "launch_pdl": True} if _supports_pdl() else {"PDL": False}


@functools.cache
def shared_memory() -> int:
    """Return the bytes of shared memory available to one program."""
    if not _on_gpu():
        return _HOPPER_SHARED_MEMORY
    utils = triton.runtime.driver.active.utils
    return utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"]


@functools.cache
def _supports_pdl() -> bool:
    return _on_gpu() and torch.cuda.get_device_capability()[0] >= _HOPPER


def _on_gpu() -> bool:
    """Return whether kernels run on a GPU and not in Triton's interpreter."""
    return torch.cuda.is_available() and not triton.knobs.runtime.interpret


@triton.jit
def pdl_wait():
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def prefetch_l2(addresses, nbytes):
    """Prefetch that many bytes (a multiple of 16) from each address into L2."""
    # One warp is enough; all warps hold the same addresses.
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %first;
            .reg .u32 %thread;
            mov.u32 %thread, %tid.x;
            setp.lt.u32 %first, %thread, 32;
            @%first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [addresses, nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def dot_precision(tensor: torch.Tensor) -> str:
    """Return the input precision of tl.dot for this dtype."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
