"""The weights that this rank holds, by names with global layer and expert indices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from slime.backends.megatron_utils.hf_weights.mappings import WHOLE, Part
from slime.backends.megatron_utils.hf_weights.rules import Match, WeightMap, canonical
from slime.backends.megatron_utils.layers.value_head import ValueHead
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

    tensor: Part = WHOLE
    expert_tensor: Part = WHOLE
    expert: Part = WHOLE

    def part(self, match: Match) -> Part:
        return self.expert_tensor if match.rule.per_expert else self.tensor


def current_layout() -> Layout:
    groups = (tensor_group(), expert_tensor_group(), expert_group())
    tensor, expert_tensor, expert = (Part(group.rank(), group.size()) for group in groups)
    return Layout(tensor=tensor, expert_tensor=expert_tensor, expert=expert)


@dataclass(frozen=True, kw_only=True)
class LocalWeight:
    """A tensor of this rank with its global name and its rule."""

    name: str
    tensor: torch.Tensor
    match: Match


def local_weights(
    chunks: Sequence[torch.nn.Module], weights: WeightMap, layout: Layout
) -> Iterator[LocalWeight]:
    """Yield parameters and persistent buffers of all chunks, without a critic's value head."""
    for chunk in map(unwrapped, chunks):
        layers = [layer.layer_number - 1 for layer in decoder_layers(chunk)]
        experts = _experts_per_rank(chunk)
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor) or _is_value_head(chunk, name):
                continue
            if name.endswith("._extra_state"):  # TransformerEngine's FP8 scales
                continue
            name = _global_name(canonical(name), layers, layout.expert.rank * experts)
            match = weights.match(name)
            if match is None:
                raise UserError(
                    f"Megatron's parameter {name} has no counterpart in a Hugging Face "
                    f"{weights.model_type} model"
                )
            yield LocalWeight(name=name, tensor=tensor.detach(), match=match)


def _global_name(name: str, layers: list[int], first_expert: int) -> str:
    name = _LAYER.sub(lambda m: f"decoder.layers.{layers[int(m[1])]}.", name)
    return _EXPERT.sub(lambda m: f".local_experts.{int(m[1]) + first_expert}.", name)


def _experts_per_rank(chunk: GPTModel) -> int:
    count = chunk.config.num_moe_experts or 0
    return count // chunk.config.expert_model_parallel_size


def _is_value_head(chunk: GPTModel, name: str) -> bool:
    return name.startswith("output_layer.") and isinstance(chunk.output_layer, ValueHead)
