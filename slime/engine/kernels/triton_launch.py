"""Kernels that are launched before the one in front of them has ended.

With EARLY a kernel says at once that the next may be launched, and waits for all before it to be done: the
time to get started is spent while others still work. A kernel that is launched so must call `start_early`
in every program before it touches what others write or read; matrices may be fetched before.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_early():
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def fetch_rows(addresses, nbytes):
    """Have that many bytes (a multiple of 16) from each address brought into the L2 cache."""
    # One warp is enough; the others hold the same addresses.
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
