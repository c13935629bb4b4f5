"""GPT-OSS: sinks, biases everywhere, and experts that Hugging Face keeps stacked and transposed."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.blocks import H, M, attention, plain
from slime.backends.megatron_utils.hf_weights.mappings import Mapping, Part, Shape
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
        _stacked("linear_fc1.weight", "gate_up_proj", ExpertGateUp()),
        _stacked("linear_fc1.bias", "gate_up_proj_bias", ExpertGateUp()),
        _stacked("linear_fc2.weight", "down_proj", ExpertDown(1)),
        _stacked("linear_fc2.bias", "down_proj_bias", ExpertDown(None)),
    ]


def _stacked(megatron: str, hf: str, mapping: Mapping) -> Rule:
    return Rule(f"{M}{_EXPERT}{megatron}", (f"{H}mlp.experts.{hf}",), mapping, stacked=True)


class ExpertGateUp(Mapping):
    """One expert of [experts, in, 2 x out] (of a bias [experts, 2 x out]), gate and up by turns."""

    dim = 0

    def shape(self, shapes: list[Shape], part: Part) -> Shape:
        _, *rest, columns = shapes[0]
        return (columns // part.size, *rest)

    def fill(
        self,
        target: torch.Tensor,
        reader: TensorReader,
        names: list[str],
        part: Part,
        expert: int = 0,
    ) -> None:
        shape = reader.shape(names[0])
        columns = part.of(shape[-1])  # of whole pairs
        cuts = (slice(expert, expert + 1), *([slice(None)] * (len(shape) - 2)), columns)
        pairs = _transposed(reader.read(names[0], *cuts)[0])
        for number, rows in enumerate(target.chunk(2)):
            rows.copy_(pairs[number::2])

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        pairs = torch.stack(whole.chunk(2), dim=1).flatten(0, 1)
        return [_transposed(pairs)]


class ExpertDown(Mapping):
    """One expert of [experts, in, out], or of a bias [experts, out]."""

    def __init__(self, dim: int | None) -> None:
        self.dim = dim

    def shape(self, shapes: list[Shape], part: Part) -> Shape:
        rest = tuple(reversed(shapes[0][1:]))
        return tuple(n // part.size if dim == self.dim else n for dim, n in enumerate(rest))

    def fill(
        self,
        target: torch.Tensor,
        reader: TensorReader,
        names: list[str],
        part: Part,
        expert: int = 0,
    ) -> None:
        cuts = [slice(expert, expert + 1)]
        if self.dim is not None:
            cuts.append(part.of(reader.shape(names[0])[1]))
        target.copy_(_transposed(reader.read(names[0], *cuts)[0]))

    def to_hf(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [_transposed(whole)]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t() if tensor.ndim == 2 else tensor
