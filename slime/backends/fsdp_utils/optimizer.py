"""AdamW over the shards of one rank, with gradient clipping by the norm over all ranks.

The update is elementwise, so it works on each rank's shards as plain tensors; only the norm of the
gradient needs the other ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slime.backends.fsdp_utils.loading import shard_of
from slime.backends.lr import lr_schedule

if TYPE_CHECKING:
    from slime.utils.arguments import Args


class ShardedAdamW:
    """`params` are those that are trained, by Hugging Face name."""

    def __init__(self, args: Args, params: dict[str, DTensor]) -> None:
        self.params = params
        self.schedule = lr_schedule(args)
        self.clip = args.clip_grad
        self.num_steps = 0
        self._local = {name: _local(param) for name, param in params.items()}
        self._adam = torch.optim.AdamW(
            self._groups(args.weight_decay),
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """Of the step that comes next."""
        return self.schedule.at(self.num_steps)

    def step(self) -> float:
        """Clip, update, forget the gradients; the norm before clipping. Not finite: nothing is updated."""
        grads = self._take_grads()
        norm = _global_norm(grads)
        if not math.isfinite(norm):
            return norm
        if self.clip and norm > self.clip:
            torch._foreach_mul_(grads, self.clip / (norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        self.num_steps += 1
        self.drop_grads()
        return norm

    def state_tensors(self) -> dict[str, DTensor]:
        """Moments by name, as parts of whole tensors, so that another number of ranks can load them."""
        self._make_moments()
        tensors = {}
        for name, param in self.params.items():
            state = self._adam.state[self._local[name]]
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{name}.{moment}"] = shard_of(param, state[moment])
        return tensors

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        for state in self._adam.state.values():
            state["step"].fill_(num_steps)

    def storages(self) -> list[torch.Tensor]:
        """The tensors whose memory can be given away between steps."""
        moments = [s[m] for s in self._adam.state.values() for m in ("exp_avg", "exp_avg_sq")]
        return [*self._local.values(), *moments]

    def _groups(self, weight_decay: float) -> list[dict[str, object]]:
        decayed = [t for name, t in self._local.items() if self.params[name].ndim > 1]
        others = [t for name, t in self._local.items() if self.params[name].ndim <= 1]
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

    def drop_grads(self) -> None:
        for name, param in self.params.items():
            param.grad = self._local[name].grad = None

    def _make_moments(self) -> None:
        """Zero moments for parameters that have not been updated yet, as Adam itself starts."""
        for local in self._local.values():
            state = self._adam.state[local]
            if not state:
                state["step"] = torch.tensor(float(self.num_steps), device=local.device)
                state["exp_avg"] = torch.zeros_like(local)
                state["exp_avg_sq"] = torch.zeros_like(local)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _global_norm(grads: list[torch.Tensor]) -> float:
    device = grads[0].device if grads else torch.device("cpu")
    norms = torch._foreach_norm(grads) if grads else [torch.zeros((), device=device)]
    squares = torch.stack([norm.float() for norm in norms]).square().sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(squares)
    return math.sqrt(squares.item()) if torch.isfinite(squares) else float("nan")
