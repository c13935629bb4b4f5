"""Linear maps of many experts at once: tokens lie expert by expert, and one kernel multiplies them all.

Every expert has a matrix of its own. Where a buffer holds these at equal distances, as Megatron's do, they
are multiplied, and their gradients added up, in place; elsewhere they are put together first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

_ALIGNMENT = 16  # bytes, of every row of what torch's grouped product takes


@dataclass(frozen=True)
class Groups:
    """Tokens of each expert: sizes [2, 0, 3] end at [2, 2, 5]."""

    sizes: list[int]
    ends: torch.Tensor  # [E] int32, on the tokens' device


def make_groups(sizes: list[int], device: torch.device) -> Groups:
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return Groups(sizes, ends.to(device, non_blocking=True))


def grouped_linear(
    x: torch.Tensor, groups: Groups, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """[T, in] -> [T, out]: the tokens of group e times the transpose of weights[e] [out, in]."""
    return _GroupedLinear.apply(x, groups, *weights)


def expert_rows(groups: Groups, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T, D]: for every token the vector [D] of its expert, such as a bias."""
    return _ExpertRows.apply(groups, *vectors)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, groups: Groups, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.groups, ctx.weights = groups, weights
        return _product(x, _together(weights).transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), groups, weights = ctx.saved_tensors, ctx.groups, ctx.weights
        grad = grad.contiguous()
        grad_x = _product(grad, _together(weights), groups) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return grad_x, None, *[None for _ in weights]
        grads = _outer(grad, x, groups)
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
        """As a product, which sums in fp32 and always in the same order."""
        ones = grad.new_ones(len(grad), _ALIGNMENT // 2)
        return None, *_outer(grad.contiguous(), ones, ctx.groups)[..., 0].unbind()


def _product(x: torch.Tensor, matrices: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[T, K] with [E, K, N], each group with its own: [T, N]."""
    if _is_aligned(x.dtype, *matrices.shape[1:]):
        return F.grouped_mm(x, matrices, offs=groups.ends)
    parts = x.split(groups.sizes)
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def _outer(grad: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[T, N] and [T, K], summed over the tokens of each group: [E, N, K]."""
    if not _is_aligned(x.dtype, grad.shape[1], x.shape[1]):
        pairs = zip(grad.split(groups.sizes), x.split(groups.sizes), strict=True)
        return torch.stack([g.t() @ part for g, part in pairs])
    sums = F.grouped_mm(grad.t(), x, offs=groups.ends)
    for expert, size in enumerate(groups.sizes):
        if size == 0:  # not written by the kernels of some GPUs
            sums[expert].zero_()
    return sums


def _is_aligned(dtype: torch.dtype, *lens: int) -> bool:
    return all(length * dtype.itemsize % _ALIGNMENT == 0 for length in lens)


def _together(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[E, out, in]"""
    in_place = _evenly_spaced(weights)
    return torch.stack(list(weights)) if in_place is None else in_place


def _add_to_main_grads(weights: Sequence[torch.Tensor], grads: torch.Tensor) -> None:
    """In one operation, where Megatron's data-parallel wrapper would take one for each expert.

    It is told so by the attribute that it knows from kernels that add gradients up themselves.
    """
    mains = [getattr(weight, "main_grad", None) for weight in weights]
    if any(main is None for main in mains):
        return
    whole = _evenly_spaced(mains)  # type: ignore[arg-type]
    if whole is None:
        return
    whole.add_(grads)
    for weight in weights:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _evenly_spaced(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors of equal shape as one, if they lie at equal distances in one buffer."""
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
