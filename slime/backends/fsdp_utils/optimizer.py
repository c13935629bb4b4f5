"""The optimizer over the shards of one rank, with gradient clipping by the global norm.

Adam and SGD are elementwise, so they work on each rank's shards as plain tensors; only the gradient
norm and Muon communicate with other ranks. Newton-Schulz iterations need full matrices: as many as
there are ranks are gathered at a time, one on each rank, so each is orthogonalized once::

    rank 0  shards of A, B  ──gather──▶  full A ──orthogonalize──▶  ──scatter──▶ its rows of A, B
    rank 1  shards of A, B  ──gather──▶  full B ──orthogonalize──▶  ──scatter──▶ its rows of A, B

Muon's momentum is elementwise and stays sharded. Its update equals torch.optim.Muon's on full
matrices for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.loading import shard_of
from slime.backends.fsdp_utils.model import output_layer
from slime.backends.optim import SIMPLE, blend_momentum, lr_schedule, muon_scale, orthogonalize

if TYPE_CHECKING:
    from slime.config.arguments import Args


class ShardedOptimizer:
    """Optimizer of the trained `params`, by Hugging Face name.

    `--optimizer muon` updates the parameters in `matrices` with Muon and all others with AdamW.
    """

    def __init__(self, args: Args, params: dict[str, DTensor], matrices: set[str]) -> None:
        self.params = params
        self.kind = args.optimizer
        self.schedule = lr_schedule(args)
        self.clip = args.clip_grad
        self.num_steps = 0
        self.moment_steps = 0  # updates that the moments have seen: fewer if they were not loaded
        self._local = {name: _local(param) for name, param in params.items()}
        by_muon = matrices & params.keys() if self.kind == "muon" else set()
        others = [name for name in params if name not in by_muon]
        self._parts = [self._elementwise(args, others)] if others else []
        if by_muon:
            self._parts.append(self._muon(args, [name for name in params if name in by_muon]))

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.at(self.num_steps)

    def step(self) -> float:
        """Clip, update and drop gradients, if their norm is finite; return the unclipped norm."""
        grads = self._take_grads()
        norm = _global_norm(grads)
        if not math.isfinite(norm):
            return norm
        if self.clip and norm > self.clip:
            torch._foreach_mul_(grads, self.clip / (norm + 1e-6))  # pyright: ignore[reportPrivateImportUsage] torch has no public name
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self.lr
            part.step()
        self.num_steps += 1
        self.moment_steps += 1
        self.drop_grads()
        return norm

    def state_tensors(self) -> dict[str, DTensor]:
        """Return moments by name, as DTensors, so that any number of ranks can load them."""
        return {
            f"{name}.{moment}": shard_of(self.params[name], local)
            for name, moments in self._moments()
            for moment, local in moments.items()
        }

    def set_num_steps(self, num_steps: int, moment_steps: int) -> None:
        self.num_steps, self.moment_steps = num_steps, moment_steps
        for part in self._parts:
            for state in part.state.values():
                if "step" in state:
                    state["step"].fill_(moment_steps)

    def storages(self) -> list[torch.Tensor]:
        """Return the tensors that can be offloaded between steps."""
        states = [state for part in self._parts for state in part.state.values()]
        moments = [tensor for state in states for name, tensor in state.items() if name != "step"]
        return [*self._local.values(), *moments]

    def drop_grads(self) -> None:
        for name, param in self.params.items():
            param.grad = self._local[name].grad = None

    def _elementwise(self, args: Args, names: list[str]) -> torch.optim.Optimizer:
        groups = self._groups(names, args.weight_decay)
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=args.lr, momentum=args.sgd_momentum)
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=args.adam_eps, fused=True)

    def _muon(self, args: Args, names: list[str]) -> torch.optim.Optimizer:
        return ShardedMuon(
            [self._local[name] for name in names],
            [self.params[name].shape for name in names],
            lr=args.lr,
            weight_decay=args.weight_decay,
            momentum=args.muon_momentum,
            nesterov=args.muon_use_nesterov,
            num_steps=args.muon_num_ns_steps,
            scale_mode=args.muon_scale_mode,
            extra_scale=args.muon_extra_scale_factor,
        )

    def _groups(self, names: list[str], weight_decay: float) -> list[dict[str, object]]:
        decayed = [self._local[name] for name in names if self.params[name].ndim > 1]
        others = [self._local[name] for name in names if self.params[name].ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def _take_grads(self) -> list[torch.Tensor]:
        grads = []
        for name, param in self.params.items():
            local = self._local[name]
            assert local.data_ptr() == _local(param).data_ptr(), f"FSDP moved {name}"
            local.grad = None if param.grad is None else _local(param.grad)
            if local.grad is not None:
                grads.append(local.grad)
        return grads

    def _moments(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (name, moments) of each parameter, created as zeros before its first update."""
        names = {local: name for name, local in self._local.items()}
        for part in self._parts:
            for group in part.param_groups:
                kept = _kept_by(part, group)
                for local in group["params"]:
                    state = part.state[local] if kept else {}
                    if kept and not state:
                        state |= {moment: torch.zeros_like(local) for moment in kept}
                        if isinstance(part, torch.optim.AdamW):
                            steps = torch.tensor(float(self.moment_steps), device=local.device)
                            state["step"] = steps
                    yield names[local], {moment: state[moment] for moment in kept}


def _kept_by(part: torch.optim.Optimizer, group: dict[str, object]) -> tuple[str, ...]:
    if isinstance(part, torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] else ()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _global_norm(grads: list[torch.Tensor]) -> float:
    device = grads[0].device if grads else torch.device("cpu")
    norms = torch._foreach_norm(grads) if grads else [torch.zeros((), device=device)]  # pyright: ignore[reportPrivateImportUsage] torch has no public name
    squares = torch.stack([norm.float() for norm in norms]).square().sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    return math.sqrt(squares.item()) if torch.isfinite(squares) else float("nan")


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
    """Yield this rank's shards of `compute(full matrix)`, each computed on one rank."""
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
