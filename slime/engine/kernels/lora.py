"""Adapters of a forward in plain torch, for the CPU and for Hugging Face modules."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from slime.engine.kernels.interface import AdapterRows, LoraWeights


def group_rows(slots: np.ndarray, device: torch.device, *, fixed: bool) -> AdapterRows | None:
    """Group the tokens of a forward by the slot of their adapter; None if no token has one.

    With `fixed` every matmul is over all tokens, whose number is the same in every forward, so that a
    token's result does not depend, bit for bit, on the adapters of other tokens.
    """
    used = np.unique(slots)
    used = used[used >= 0].tolist()
    if not used:
        return None
    groups = [(slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(device)) for slot in used]
    return AdapterRows(slots=torch.from_numpy(slots), groups=groups, fixed=fixed)


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoraWeights, rows: AdapterRows) -> None:
    """Add B(A(x) * scale) to the rows of `out` that have an adapter, leaving other rows untouched."""
    target = out if out.ndim == 2 else out[0]  # the first of split-K partial sums
    most = weights.b.shape[2]
    for slot, index in rows.groups:
        ranks = weights.ranks[slot].tolist()
        if not any(ranks):
            continue
        all_rows = len(index) == len(x) and not rows.fixed
        chosen = x if all_rows or rows.fixed else x.index_select(0, index)
        low = F.linear(chosen, weights.a[slot]).mul_(weights.scales[slot])  # [rows, n * R]
        end = 0
        for part, (width, rank) in enumerate(zip(weights.widths, ranks, strict=True)):
            start, end = end, end + width
            if not rank:
                continue
            left = low[:, part * most : part * most + rank]
            b = weights.b[slot, start:end, :rank]
            if all_rows:
                target[:, start:end].addmm_(left, b.t())
                continue
            delta = F.linear(left, b)
            if rows.fixed:
                delta = delta.index_select(0, index)
            target[:, start:end].index_add_(0, index, delta)
