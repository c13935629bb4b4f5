"""Gather the full Hugging Face tensors of a sharded model, one after another.

All ranks follow the same sequence. A weight is gathered over the tensor ranks of the pipeline stage
that holds it (over expert-tensor and expert ranks for experts), then broadcast to the other stages,
so every rank gets every full tensor, and only one at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.hf_weights.local_weights import current_layout, local_weights
from slime.backends.megatron_utils.hf_weights.rules import Rule, WeightMap
from slime.backends.megatron_utils.parallel import (
    all_gather,
    expert_group,
    expert_tensor_group,
    pipeline_group,
    tensor_group,
)
from slime.config.peft_files import LORA_A, LORA_B, flat_name
from slime.utils.device import current_device
from slime.weights.buckets import NamedTensor, batches, merge_adapter
from slime.weights.sync import serving_dtype

if TYPE_CHECKING:
    from slime.config.arguments import Args


def export_hf(
    chunks: Sequence[torch.nn.Module],
    weights: WeightMap,
    dtype: torch.dtype | None = None,
    *,
    with_mtp: bool = True,
    merge: Merge | None = None,
) -> Iterator[NamedTensor]:
    """Yield (Hugging Face name, full tensor) on every rank, in layer order.

    Tensors are in `dtype`, or in the model's. They may share memory with the model: read them
    before the next training step. `merge` merges adapters into their weights. With `with_mtp=False`
    the multi-token-prediction layers are omitted.
    """
    gather = _Gather(chunks, weights, dtype, merge)
    for rule, layer in weights.in_layer_order():
        if with_mtp or not rule.is_mtp:
            yield from gather.tensors(rule, layer)


def hf_buckets(
    args: Args,
    chunks: Sequence[torch.nn.Module],
    weights: WeightMap,
    *,
    merge: Merge | None = None,
) -> Iterator[list[NamedTensor]]:
    """Yield what an update sends in lists of --update-weight-buffer-size, empty on ranks that do not send."""
    dtype, with_mtp = serving_dtype(args), serves_mtp(args)
    tensors = export_hf(chunks, weights, dtype, with_mtp=with_mtp, merge=merge)
    sends = dist.get_rank() == 0 or args.update_weight_transport == "tensor"
    return batches(
        tensors, lambda named: named[1].nbytes, args.update_weight_buffer_size, keep=sends
    )


def serves_mtp(args: Args) -> bool:
    """Return whether engines draft with the multi-token-prediction layers of the model."""
    algorithm = (args.sglang_speculative_algorithm or "").upper()
    own_layers = algorithm in ("EAGLE", "NEXTN") and not args.sglang_speculative_draft_model_path
    return args.rollout_engine == "sglang" and own_layers


def with_copies(
    buckets: Iterable[list[NamedTensor]], copies: dict[str, str], names: Container[str]
) -> Iterator[list[NamedTensor]]:
    """Yield the buckets, and again each tensor with a second name among `names`."""
    for bucket in buckets:
        yield bucket
        again = [
            (copy, tensor)
            for name, tensor in bucket
            for copy, original in copies.items()
            if original == name and copy in names
        ]
        if again:
            yield again


@dataclass(frozen=True)
class _Location:
    """The pipeline stage that holds a weight, and its shape and dtype there."""

    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Merge:
    """Merges full adapters, by Hugging Face name, into weights."""

    def __init__(self, adapters: dict[str, torch.Tensor], scaling: float) -> None:
        self._adapters, self._scaling = adapters, scaling

    def has(self, name: str) -> bool:
        return flat_name(name).removesuffix(".weight") + LORA_A in self._adapters

    def __call__(self, name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        module = flat_name(name).removesuffix(".weight")
        a, b = self._adapters[module + LORA_A], self._adapters[module + LORA_B]
        return merge_adapter(weight, a, b, self._scaling, dtype)


class _Gather:
    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        weights: WeightMap,
        dtype: torch.dtype | None,
        merge: Merge | None,
    ) -> None:
        layout = current_layout()
        self._dtype, self._merge = dtype, merge
        self._layout, self._expert = layout, layout.expert
        local = list(local_weights(chunks, weights, layout))
        self._local = {weight.name: weight.tensor for weight in local}
        self._stage = pipeline_group().rank()
        self._locations = self._locate()
        experts = {w.match.expert for w in local if w.match.rule.per_expert}
        self._num_local = max(_all_gather_over_stages(len(experts)))

    def tensors(self, rule: Rule, layer: int) -> Iterator[NamedTensor]:
        """Yield the Hugging Face tensors of one rule; none if the layer is of another kind."""
        if rule.load_only:
            return
        if rule.per_expert:
            yield from self._experts(rule, layer)
        elif rule.name(layer) in self._locations:
            names = rule.hf_names(layer)
            whole = self._whole(rule, rule.name(layer), names)
            yield from self._named(rule, names, rule.mapping.to_hf(whole))

    def _experts(self, rule: Rule, layer: int) -> Iterator[NamedTensor]:
        """Yield experts, gathering the n-th local expert of all expert ranks at a time."""
        first_local = self._expert.rank * self._num_local
        if self._num_local == 0 or rule.name(layer, first_local) not in self._locations:
            return
        stacked: dict[int, list[torch.Tensor]] = {}
        for number in range(self._num_local):
            names = [
                name
                for rank in range(self._expert.size)
                for name in rule.hf_names(layer, rank * self._num_local + number)
            ]
            of_each_rank = self._whole(rule, rule.name(layer, first_local + number), names)
            for rank, whole in enumerate(of_each_rank):
                expert = rank * self._num_local + number
                tensors = rule.mapping.to_hf(whole)
                if rule.stacked:
                    stacked[expert] = tensors
                else:
                    yield from self._named(rule, rule.hf_names(layer, expert), tensors)
        if rule.stacked:
            of_each_name = zip(*(stacked[expert] for expert in sorted(stacked)), strict=True)
            for name, experts in zip(rule.hf_names(layer), of_each_name, strict=True):
                yield name, torch.stack(experts)

    def _named(
        self, rule: Rule, names: list[str], tensors: list[torch.Tensor]
    ) -> Iterator[NamedTensor]:
        for name, tensor in zip(names, tensors, strict=True):
            dtype = tensor.dtype if self._dtype is None or rule.fp32 else self._dtype
            if self._merge is not None and self._merge.has(name):
                yield name, self._merge(name, tensor, dtype)
            else:  # not cast yet if another part of its fused weight is merged
                yield name, tensor.to(dtype)

    def _whole(self, rule: Rule, name: str, hf_names: list[str]) -> torch.Tensor:
        """Return the full tensor; for an expert, that of every expert rank: [expert ranks, ...].

        Weights with adapters are cast after merging.
        """
        location = self._locations[name]
        merged = self._merge is not None and any(map(self._merge.has, hf_names))
        as_is = self._dtype is None or rule.fp32 or merged
        dtype = location.dtype if as_is or self._dtype is None else self._dtype
        if location.stage == self._stage:
            whole = _gathered(rule, self._local[name].to(current_device(), dtype))
        else:
            whole = torch.empty(
                self._shape(rule, location.shape), dtype=dtype, device=current_device()
            )
        _broadcast_from_stage(whole, location.stage)
        return whole

    def _shape(self, rule: Rule, local: tuple[int, ...]) -> tuple[int, ...]:
        whole = rule.mapping.whole_shape(local, self._layout.shard(rule))
        return (self._expert.size, *whole) if rule.per_expert else whole

    def _locate(self) -> dict[str, _Location]:
        local = {
            name: _Location(self._stage, tuple(tensor.shape), tensor.dtype)
            for name, tensor in self._local.items()
        }
        locations: dict[str, _Location] = {}
        for stage in _all_gather_over_stages(local):
            locations = {**stage, **locations}
        return locations


def _gathered(rule: Rule, local: torch.Tensor) -> torch.Tensor:
    """Gather a tensor over the tensor ranks, then experts over the expert ranks."""
    whole = local
    if rule.mapping.dim is not None:
        group = expert_tensor_group() if rule.of_experts else tensor_group()
        whole = rule.mapping.join(all_gather(local, group))
    if not rule.of_experts:
        return whole
    of_each_rank = all_gather(whole, expert_group())
    return torch.cat(of_each_rank) if rule.all_experts else torch.stack(of_each_rank)


def _all_gather_over_stages(value: object) -> list:
    group = pipeline_group()
    values = [value] * group.size()
    if group.size() > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def _broadcast_from_stage(tensor: torch.Tensor, stage: int) -> None:
    group = pipeline_group()
    if group.size() > 1:
        dist.broadcast(tensor, group=group, group_src=stage)
