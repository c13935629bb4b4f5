"""The weights that this rank holds, by global names, and how to load them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.models.gpt import GPTModel

from slime.backends.megatron_utils.hf_weights.mappings import WHOLE, Shard
from slime.backends.megatron_utils.hf_weights.reader import TensorReader
from slime.backends.megatron_utils.hf_weights.rules import (
    ADAPTERS,
    Match,
    Rule,
    WeightMap,
    canonical,
)
from slime.backends.megatron_utils.layers import ValueHead
from slime.backends.megatron_utils.parallel import (
    decoder_layers,
    expert_group,
    expert_tensor_group,
    tensor_group,
    unwrapped,
)
from slime.core.errors import UserError

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Position of this rank in the tensor, expert-tensor and expert parallel groups."""

    tensor: Shard = WHOLE
    expert_tensor: Shard = WHOLE
    expert: Shard = WHOLE

    def shard(self, rule: Rule, expert: int = 0) -> Shard:
        if rule.of_experts:
            return replace(self.expert_tensor, experts=self.expert, expert=expert)
        return self.tensor


def current_layout() -> Layout:
    groups = (tensor_group(), expert_tensor_group(), expert_group())
    tensor, expert_tensor, expert = (Shard(group.rank(), group.size()) for group in groups)
    return Layout(tensor=tensor, expert_tensor=expert_tensor, expert=expert)


@dataclass(frozen=True, kw_only=True)
class LocalWeight:
    """A tensor of this rank with its global name and its rule."""

    name: str
    tensor: torch.Tensor
    match: Match
    local_name: str  # in the state dict of its chunk


def local_weights(
    chunks: Sequence[torch.nn.Module], weights: WeightMap, layout: Layout
) -> Iterator[LocalWeight]:
    """Yield parameters and persistent buffers of all chunks, without a critic's value head.

    Yield adapters if `weights` has their rules, else base weights.
    """
    for chunk in map(unwrapped, chunks):
        layers = [layer.layer_number - 1 for layer in decoder_layers(chunk)]
        experts = _experts_per_rank(chunk)
        for local_name, tensor in chunk.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor) or _is_value_head(chunk, local_name):
                continue
            if local_name.endswith("._extra_state"):  # TransformerEngine's FP8 scales
                continue
            if (ADAPTERS in local_name) != weights.of_adapters:
                continue
            name = _global_name(canonical(local_name), layers, layout.expert.rank * experts)
            match = weights.match(name)
            if match is None:
                raise UserError(
                    f"Megatron's parameter {name} has no counterpart in a Hugging Face "
                    f"{weights.model_type} model"
                )
            yield LocalWeight(name=name, tensor=tensor.detach(), match=match, local_name=local_name)


def load_hf(
    chunks: Sequence[torch.nn.Module],
    weights: WeightMap,
    reader: TensorReader,
    *,
    on_tensor: Callable[[LocalWeight], None] | None = None,
    only_mtp: bool = False,
) -> None:
    """Load every local weight of `chunks`, reading only the shards of this rank.

    With `only_mtp`, load those of multi-token-prediction layers.

    Before anything is changed, raise UserError for a tensor that is missing or has another shape.
    """
    layout = current_layout()
    found = local_weights(chunks, weights, layout)
    targets = [weight for weight in found if weight.match.rule.is_mtp or not only_mtp]
    for weight in targets:
        check_shape(weight, reader, layout)
    for weight in targets:
        rule, shard = weight.match.rule, layout.shard(weight.match.rule, weight.match.expert)
        with torch.no_grad():
            rule.mapping.fill(weight.tensor, reader, weight.match.hf_names, shard)
        if on_tensor is not None:
            on_tensor(weight)


def check_shape(weight: LocalWeight, reader: TensorReader, layout: Layout) -> None:
    match = weight.match
    shapes = [reader.shape(name) for name in match.hf_names]
    shape = match.rule.mapping.shape(shapes, layout.shard(match.rule))
    if shape != tuple(weight.tensor.shape):
        found = ", ".join(
            f"{name} {list(shape)}" for name, shape in zip(match.hf_names, shapes, strict=True)
        )
        raise UserError(
            f"{found} does not fit the model that config.json describes: {weight.name} is "
            f"{list(weight.tensor.shape)} on this rank and would be {list(shape)}"
        )


def _global_name(name: str, layers: list[int], first_expert: int) -> str:
    name = _LAYER.sub(lambda m: f"decoder.layers.{layers[int(m[1])]}.", name)
    return _EXPERT.sub(lambda m: f".local_experts.{int(m[1]) + first_expert}.", name)


def _experts_per_rank(chunk: GPTModel) -> int:
    count = chunk.config.num_moe_experts or 0
    return count // chunk.config.expert_model_parallel_size


def _is_value_head(chunk: GPTModel, name: str) -> bool:
    return name.startswith("output_layer.") and isinstance(chunk.output_layer, ValueHead)
