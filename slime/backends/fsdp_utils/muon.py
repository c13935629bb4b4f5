"""Muon on parameters that FSDP has sharded by rows.

    rank 0  shards of A, B  ──gather──▶  full A ──orthogonalize──▶  ──scatter──▶ its rows of A, B
    rank 1  shards of A, B  ──gather──▶  full B ──orthogonalize──▶  ──scatter──▶ its rows of A, B

Momentum is elementwise and stays sharded. Newton-Schulz iterations need full matrices: as many as
there are ranks are gathered at a time, one on each rank, so each is orthogonalized once.
The update equals torch.optim.Muon's on full matrices for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.model import output_layer
from slime.backends.muon import SIMPLE, blend_momentum, muon_scale, orthogonalize


class ShardedMuon(torch.optim.Optimizer):
    """Muon over local shards `params` of parameters with the full `shapes`, in the same order.

    A 2-D parameter is one matrix. A 3-D parameter is one matrix per expert, sharded by experts, so
    that every rank holds full matrices.
    """

    def __init__(
        self,
        params: list[torch.Tensor],
        shapes: list[torch.Size],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        num_steps: int,
        scale_mode: str,
        extra_scale: float,
    ) -> None:
        self._shapes = dict(zip(params, shapes, strict=True))
        self._num_steps, self._nesterov = num_steps, nesterov
        self._scale = {
            param: extra_scale * muon_scale(shape[-2], shape[-1], scale_mode)
            for param, shape in self._shapes.items()
        }
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            experts = [param for param in params if param.ndim == 3]
            for param in experts:
                self._apply(param, self._orthogonal(self._blend(param, group)), group)
            matrices = [param for param in params if param.ndim == 2]
            updates = (self._blend(param, group) for param in matrices)
            whole = _each_by_one_rank(
                updates, [self._shapes[p] for p in matrices], self._orthogonal
            )
            for param, update in zip(matrices, whole, strict=True):
                self._apply(param, update, group)

    def _blend(self, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum, grad = state["momentum_buffer"], param.grad
        assert grad is not None
        update = blend_momentum(grad, momentum, group["momentum"], nesterov=self._nesterov)
        return update.bfloat16()

    def _orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        return orthogonalize(matrix, steps=self._num_steps, coefficients=SIMPLE)

    def _apply(self, param: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(update, alpha=-group["lr"] * self._scale[param])


def muon_names(hf: PreTrainedModel, params: dict[str, DTensor]) -> set[str]:
    """Return the names of hidden weight matrices: all but embeddings, LM head, norms and biases."""
    others = {id(module.weight) for module in hf.modules() if isinstance(module, nn.Embedding)}
    others.add(id(output_layer(hf).weight))
    return {
        name
        for name, param in params.items()
        if id(param) not in others
        and (param.ndim == 2 or (param.ndim == 3 and ".experts." in name))
    }


def _each_by_one_rank(
    shards: Iterator[torch.Tensor],
    shapes: list[torch.Size],
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Yield this rank's shards of `compute` on full matrices, each computed on one rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        yield from (compute(matrix) for matrix in shards)
        return
    for start in range(0, len(shapes), world):
        some = shapes[start : start + world]
        mine = [next(shards) for _ in some]
        wholes = [
            _gather(part, shape, owner)
            for owner, (part, shape) in enumerate(zip(mine, some, strict=True))
        ]
        own = wholes[rank] if rank < len(some) else None
        done = None if own is None else compute(own)
        for owner, part in enumerate(mine):
            yield _scatter(done if owner == rank else None, part, some[owner], owner)


def _gather(part: torch.Tensor, shape: torch.Size, owner: int) -> torch.Tensor | None:
    """Gather the full matrix on rank `owner`; return None on other ranks."""
    rows = _rows_per_rank(shape)
    sent = _padded(part, rows)
    parts = None
    if dist.get_rank() == owner:
        parts = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.gather(sent, parts, dst=owner)
    return None if parts is None else torch.cat(parts)[: shape[0]]


def _scatter(
    whole: torch.Tensor | None, part: torch.Tensor, shape: torch.Size, owner: int
) -> torch.Tensor:
    """Scatter the full matrix from rank `owner`; return this rank's rows."""
    rows = _rows_per_rank(shape)
    parts = None
    if whole is not None:
        padded = _padded(whole, rows * dist.get_world_size())
        parts = [one.contiguous() for one in padded.split(rows)]
    received = torch.empty(rows, shape[1], dtype=part.dtype, device=part.device)
    dist.scatter(received, parts, src=owner)
    return received[: part.shape[0]]


def _rows_per_rank(shape: torch.Size) -> int:
    return -(-shape[0] // dist.get_world_size())  # FSDP shards rows like torch.chunk


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, count - rows.shape[0])).contiguous()
