"""Grouped GEMM for MoE: one kernel multiplies tokens, sorted by expert, by their expert's weight.

Each expert has its own weight tensor. If they have a constant stride in one buffer, as in Megatron,
they are used, and their gradients accumulated, in place; otherwise they are stacked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

_ALIGNMENT = 16  # bytes; torch's grouped_mm requires it of every row


@dataclass(frozen=True)
class Groups:
    """Number of tokens of each expert and their offsets: sizes [2, 0, 3] have ends [2, 2, 5]."""

    sizes: list[int]
    ends: torch.Tensor  # [E] int32, on the tokens' device


def make_groups(sizes: list[int], device: torch.device) -> Groups:
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return Groups(sizes, ends.to(device, non_blocking=True))


def grouped_linear(
    x: torch.Tensor, groups: Groups, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Map [T, in] to [T, out]: tokens of group e @ weights[e].T, where weights[e] is [out, in]."""
    return _GroupedLinear.apply(x, groups, *weights)


def expert_rows(groups: Groups, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [T, D]: for each token the vector [D] of its expert, such as a bias."""
    return _ExpertRows.apply(groups, *vectors)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: Groups, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.groups, ctx.weights = groups, weights
        return grouped_matmul(x, _combined(weights).transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), groups, weights = ctx.saved_tensors, ctx.groups, ctx.weights
        grad = grad.contiguous()
        grad_x = (
            grouped_matmul(grad, _combined(weights), groups) if ctx.needs_input_grad[0] else None
        )
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, None, *[None for _ in weights]
        grads = grouped_outer(grad, x, groups)
        _add_to_main_grads(weights, grads)
        return grad_x, None, *grads.unbind()


class _ExpertRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: Groups, *vectors: torch.Tensor) -> torch.Tensor:
        ctx.groups = groups
        sizes = groups.ends.diff(prepend=groups.ends.new_zeros(1))
        return torch.stack(vectors).repeat_interleave(sizes, dim=0, output_size=sum(groups.sizes))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Sum by a matmul with ones, which accumulates in fp32 and is deterministic."""
        ones = grad.new_ones(len(grad), _ALIGNMENT // 2)
        return None, *grouped_outer(grad.contiguous(), ones, ctx.groups)[..., 0].unbind()


def grouped_matmul(x: torch.Tensor, matrices: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Multiply [T, K] by [E, K, N], each group by its own matrix: [T, N]."""
    if _is_aligned(x.dtype, *matrices.shape[1:]):
        return F.grouped_mm(x, matrices, offs=groups.ends)
    parts = x.split(groups.sizes)
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def grouped_outer(grad: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return grad.T @ x for the tokens of each group, from [T, N] and [T, K]: [E, N, K]."""
    if not _is_aligned(x.dtype, grad.shape[1], x.shape[1]):
        pairs = zip(grad.split(groups.sizes), x.split(groups.sizes), strict=True)
        return torch.stack([g.t() @ part for g, part in pairs])
    sums = F.grouped_mm(grad.t(), x, offs=groups.ends)
    for expert, size in enumerate(groups.sizes):
        if size == 0:  # some GPUs' kernels leave the output of empty groups uninitialized
            sums[expert].zero_()
    return sums


def _is_aligned(dtype: torch.dtype, *lens: int) -> bool:
    return all(length * dtype.itemsize % _ALIGNMENT == 0 for length in lens)


def _combined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weights as one tensor [E, out, in], without a copy if they are evenly spaced."""
    in_place = _evenly_spaced(weights)
    return torch.stack(list(weights)) if in_place is None else in_place


def _add_to_main_grads(weights: Sequence[torch.Tensor], grads: torch.Tensor) -> None:
    """Accumulate all experts' gradients in one operation instead of Megatron DDP's one per expert.

    `grad_added_to_main_grad` tells DDP to skip these weights, as after a fused wgrad kernel.
    """
    mains = [getattr(weight, "main_grad", None) for weight in weights]
    given = [main for main in mains if main is not None]
    whole = _evenly_spaced(given) if len(given) == len(weights) else None
    if whole is None:
        return
    whole.add_(grads)
    for weight in weights:
        setattr(weight, "grad_added_to_main_grad", True)  # noqa: B010 - an attribute of Megatron's


def _evenly_spaced(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a strided view over tensors of equal shape, or None if they are not evenly spaced."""
    first, last = tensors[0], tensors[-1]
    starts = [tensor.data_ptr() for tensor in tensors]
    step = starts[1] - starts[0] if len(starts) > 1 else first.nbytes
    if any(b - a != step for a, b in pairwise(starts)):
        return None
    same_buffer = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    if not same_buffer or step < first.nbytes or step % _ALIGNMENT or not first.is_contiguous():
        return None
    strides = (step // first.element_size(), *first.stride())
    return first.detach().as_strided((len(tensors), *first.shape), strides)
