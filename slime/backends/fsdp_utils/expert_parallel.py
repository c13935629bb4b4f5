"""Expert parallelism of MoE layers: ranks exchange tokens instead of gathering all experts.

With --expert-model-parallel-size N, N neighbouring ranks together hold all experts of a layer for
their tokens. Example: 8 experts, 4 ranks, N = 2::

    rank                               0        1        2        3
    experts of the shard it stores     0,1      2,3      4,5      6,7      the same for every N
    experts it computes                0,1,4,5  2,3,6,7  0,1,4,5  2,3,6,7  gathered from rank +-2
    rank it exchanges tokens with      1        0        3        2

A rank stores the shard that it would store without expert parallelism. Loading, checkpoints, the
optimizer, clipping and weight updates therefore do not depend on N.

    tokens ── all-to-all ──▶ sorted by expert ── two grouped matmuls ──▶ ── all-to-all ──▶ weighted sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from slime.backends.kernels.fused_ops import SCALE
from slime.backends.kernels.grouped_linear import (
    Groups,
    grouped_matmul,
    grouped_outer,
    make_groups,
)
from slime.core.errors import UserError
from slime.utils.device import current_device, device_type

_WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class ExpertGroups:
    """Process groups of a rank; `exchange` has N ranks, `shards` has world size / N."""

    exchange: dist.ProcessGroup  # ranks that together compute all experts
    shards: dist.ProcessGroup  # ranks that compute the same experts, of which each stores a shard

    @property
    def world_size(self) -> int:
        return self.exchange.size() * self.shards.size()

    def slots(self, num_experts: int) -> torch.Tensor:
        """Return [E]: for each expert, rank in `exchange` x experts of a rank + index on that rank.

        In the example above: [0, 1, 4, 5, 2, 3, 6, 7].
        """
        chunks = torch.arange(num_experts).view(self.shards.size(), self.exchange.size(), -1)
        return chunks.transpose(0, 1).flatten().argsort()


def make_expert_groups(size: int, world_size: int) -> ExpertGroups | None:
    """Create the groups for --expert-model-parallel-size `size`; None for 1. A collective call."""
    if size == 1:
        return None
    names = ("expert_shards", "expert_exchange")
    device = "cpu" if device_type() == "meta" else device_type()
    mesh = init_device_mesh(device, (world_size // size, size), mesh_dim_names=names)
    return ExpertGroups(exchange=mesh.get_group(names[1]), shards=mesh.get_group(names[0]))


def parallelize_experts(
    hf: nn.Module, mesh: DeviceMesh, groups: ExpertGroups, dtype: torch.dtype
) -> set[nn.Parameter]:
    """Shard the experts of all MoE layers over `mesh` and replace their forward.

    Return their parameters, which FSDP must ignore: they are gathered here, only this rank's, in `dtype`.
    """
    sharded: set[nn.Parameter] = set()
    for name, module in hf.named_modules():
        if not _has_experts(module):
            continue
        _refuse_unsupported(name, module, mesh.size())
        num_experts = getattr(module, _WEIGHTS[0]).shape[0]
        for weight in _WEIGHTS:
            param = _shard(getattr(module, weight), mesh)
            setattr(module, weight, param)
            sharded.add(param)
        module.forward = _ParallelExperts(module, groups, num_experts, dtype)
    return sharded


def _has_experts(module: nn.Module) -> bool:
    weight = getattr(module, _WEIGHTS[0], None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 3


def _refuse_unsupported(name: str, module: nn.Module, world_size: int) -> None:
    flag = "--expert-model-parallel-size with --train-backend fsdp"
    count = getattr(module, _WEIGHTS[0]).shape[0]
    if count % world_size:
        raise UserError(
            f"{flag}: the {count} experts of a layer are not a multiple of the {world_size} ranks: remove "
            "it, or train on another number of GPUs"
        )
    plain = getattr(module, "has_gate", False) and not getattr(module, "is_transposed", True)
    others = [p for p, _ in module.named_parameters() if p not in _WEIGHTS]
    in_fp8 = hasattr(module, _WEIGHTS[0] + SCALE)
    if not plain or others or in_fp8:
        what = f"has {others[0]}" if others else f"is a {type(module).__name__}"
        what += " in FP8" if in_fp8 else ""
        raise UserError(
            f"{flag}: {name} {what}, and only experts of gate_up_proj and down_proj are spread over ranks: "
            "remove it, or use --train-backend megatron"
        )


def _shard(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's shard of a parameter on the meta device, as FSDP would shard it."""
    rows = param.shape[0] // mesh.size()
    local = torch.empty(rows, *param.shape[1:], dtype=param.dtype, device=param.device)
    whole = DTensor.from_local(
        local, mesh, (Shard(0),), run_check=False, shape=param.shape, stride=param.stride()
    )
    return nn.Parameter(whole, requires_grad=param.requires_grad)


class _ParallelExperts:
    """The forward of a module of experts; arguments and result are those of transformers."""

    def __init__(
        self, module: nn.Module, groups: ExpertGroups, num_experts: int, dtype: torch.dtype
    ) -> None:
        self._module: Any = module
        self._groups = groups
        self._slots = groups.slots(num_experts)
        self._dtype = dtype

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [T, H]
        top_k_index: torch.Tensor,  # [T, K]
        top_k_weights: torch.Tensor,  # [T, K]
    ) -> torch.Tensor:
        group, topk = self._groups.exchange, top_k_index.shape[1]
        self._slots = self._slots.to(top_k_index.device)
        slots = self._slots[top_k_index.flatten()]
        order = slots.argsort(stable=True)
        outgoing = torch.bincount(slots, minlength=len(self._slots)).view(group.size(), -1)
        incoming = torch.empty_like(outgoing)  # [ranks, experts of this rank]
        dist.all_to_all_single(incoming, outgoing, group=group)
        sent, received = outgoing.sum(1).tolist(), incoming.sum(1).tolist()
        rows = _Exchange.apply(hidden_states[order // topk], group, sent, received)
        output = self._compute(rows, incoming)
        output = _Exchange.apply(output, group, received, sent)
        output = output[order.argsort()].view(*top_k_index.shape, -1)  # [T, K, H]
        return (output * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _compute(self, rows: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
        """Apply this rank's experts to rows that are sorted by sender, then by expert."""
        senders, experts = incoming.shape
        ids = torch.arange(experts, device=rows.device).repeat(senders)
        by_expert = ids.repeat_interleave(incoming.flatten()).argsort(stable=True)
        sizes = incoming.sum(0).tolist()
        inputs = rows[by_expert]
        if len(rows) == 0:  # one dummy token, so that weights get zero gradients
            inputs, sizes[0] = F.pad(inputs, (0, 0, 0, 1)), 1
        groups = make_groups(sizes, rows.device)
        inner = self._module._apply_gate(self._linear(inputs, groups, _WEIGHTS[0]))
        output = self._linear(inner, groups, _WEIGHTS[1])
        return output[: len(rows)][by_expert.argsort()]

    def _linear(self, x: torch.Tensor, groups: Groups, weight: str) -> torch.Tensor:
        local = getattr(self._module, weight).to_local()
        return _ShardedGroupedLinear.apply(x, local, groups, self._groups, self._dtype)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: `sent[r]` rows go to rank r of the group, `received[r]` come from it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        group: dist.ProcessGroup,
        sent: list[int],
        received: list[int],
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grad, ctx.group, ctx.received, ctx.sent), None, None, None


def _exchange(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
) -> torch.Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


class _ShardedGroupedLinear(torch.autograd.Function):
    """Grouped linear layers whose weights are gathered in the forward and again in the backward pass.

    Like FSDP, keep only the shard in between, reduce gradients in fp32 and average them over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        local: torch.Tensor,
        groups: Groups,
        ranks: ExpertGroups,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, local)
        ctx.groups, ctx.ranks, ctx.dtype = groups, ranks, dtype
        return grouped_matmul(x, _gathered(local, ranks, dtype).transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, local = ctx.saved_tensors
        grad, grad_x, grad_local = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_matmul(grad, _gathered(local, ctx.ranks, ctx.dtype), ctx.groups)
        if ctx.needs_input_grad[1]:
            sums = grouped_outer(grad, x, ctx.groups).float()
            grad_local = _reduced(sums, ctx.ranks).to(local.device, local.dtype)
        return grad_x, grad_local, None, None, None


def _gathered(local: torch.Tensor, ranks: ExpertGroups, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights of all experts that this rank computes: [experts, out, in]."""
    part = local.detach().to(current_device(), dtype)
    if ranks.shards.size() == 1:
        return part
    whole = part.new_empty(part.shape[0] * ranks.shards.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=ranks.shards)
    return whole


def _reduced(sums: torch.Tensor, ranks: ExpertGroups) -> torch.Tensor:
    """Return this rank's shard of the gradients, averaged over all ranks."""
    if ranks.shards.size() > 1:
        whole, sums = sums, sums.new_empty(sums.shape[0] // ranks.shards.size(), *sums.shape[1:])
        dist.reduce_scatter_tensor(sums, whole, group=ranks.shards)
    return sums.div_(ranks.world_size)
