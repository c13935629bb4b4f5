"""GPT-OSS: sinks, biases everywhere, experts that Hugging Face stores stacked and transposed."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import H, M, attention, plain
from slime.backends.megatron_utils.hf_weights.mappings import (
    GateUp,
    Mapping,
    Part,
    Plain,
    Shape,
)
from slime.backends.megatron_utils.hf_weights.reader import TensorReader
from slime.backends.megatron_utils.hf_weights.rules import Rule

_EXPERT = "mlp.experts.local_experts.{expert}."


def layer_rules(config: PretrainedConfig) -> list[Rule]:
    return [
        *attention(config, qkv_bias=True),
        plain("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
        plain("self_attention.core_attention.softmax_offset", "self_attn.sinks", "column"),
        plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        plain("mlp.router.weight", "mlp.router.weight"),
        plain("mlp.router.bias", "mlp.router.bias"),
        _stacked("linear_fc1.weight", "gate_up_proj", GateUpByTurns()),
        _stacked("linear_fc1.bias", "gate_up_proj_bias", GateUpByTurns()),
        _stacked("linear_fc2.weight", "down_proj", Plain("row")),
        _stacked("linear_fc2.bias", "down_proj_bias", Plain()),
    ]


def _stacked(megatron: str, hf: str, mapping: Mapping) -> Rule:
    return Rule(
        f"{M}{_EXPERT}{megatron}", (f"{H}mlp.experts.{hf}",), OfStack(mapping), stacked=True
    )


class GateUpByTurns(GateUp):
    """Gate and up in one tensor whose rows alternate between them."""

    def fill(
        self,
        target: torch.Tensor,
        reader: TensorReader,
        names: list[str],
        part: Part,
        expert: int = 0,
    ) -> None:
        rows = reader.read(names[0], part.of(reader.shape(names[0])[0]))  # whole pairs
        for number, half in enumerate(target.chunk(2)):
            half.copy_(rows[number::2])

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack(whole.chunk(2), dim=1).flatten(0, 1)]


class OfStack(Mapping):
    """Apply a mapping to one expert of tensors [experts, in, out] or biases [experts, out]."""

    def __init__(self, inner: Mapping) -> None:
        self._inner, self.dim = inner, inner.dim

    def shape(self, shapes: list[Shape], part: Part) -> Shape:
        return self._inner.shape([_of_one(shape) for shape in shapes], part)

    def fill(
        self,
        target: torch.Tensor,
        reader: TensorReader,
        names: list[str],
        part: Part,
        expert: int = 0,
    ) -> None:
        self._inner.fill(target, OneOfStack(reader, expert), names, part)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self._inner.join(parts)

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [_transposed(tensor) for tensor in self._inner.to_hf(whole)]


class OneOfStack:
    """Read one expert's tensors as [out, in] and [out]."""

    def __init__(self, reader: TensorReader, expert: int) -> None:
        self._reader, self._expert = reader, expert

    def names(self) -> list[str]:
        return self._reader.names()

    def shape(self, name: str) -> Shape:
        return _of_one(self._reader.shape(name))

    def read(self, name: str, *cuts: slice) -> torch.Tensor:
        every = [slice(None)] * (len(self.shape(name)) - len(cuts))
        there = [slice(self._expert, self._expert + 1), *reversed([*cuts, *every])]
        return _transposed(self._reader.read(name, *there)[0])


def _of_one(shape: Shape) -> Shape:
    return tuple(reversed(shape[1:]))


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t() if tensor.ndim == 2 else tensor
