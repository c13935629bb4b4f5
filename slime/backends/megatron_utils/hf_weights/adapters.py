"""The rules of LoRA adapters, derived from those of the base weights.

Every Hugging Face module has an A and a B of its own, also where Megatron fuses several modules into
one linear layer. They are sharded like the layer: of a column-parallel one B by rows, of a
row-parallel one A by columns::

    decoder.layers.0.self_attention.linear_qkv.lora.q_proj.lora_A   model.layers.0.self_attn.q_proj.lora_A.weight
    decoder.layers.0.self_attention.linear_qkv.lora.q_proj.lora_B   model.layers.0.self_attn.q_proj.lora_B.weight

Adapters of all experts of a layer are one parameter; Hugging Face's experts fuse gate and up::

    decoder.layers.0.mlp.experts.lora.gate_up_proj.lora_A           model.layers.0.mlp.experts.gate_up_proj.lora_A.weight
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.architecture import layer_pattern
from slime.backends.megatron_utils.hf_weights.mappings import ExpertMatrices, GateUp, Plain
from slime.backends.megatron_utils.hf_weights.rules import ADAPTERS, Rule, WeightMap
from slime.backends.megatron_utils.layers import is_linear
from slime.config.lora import LoraConfig
from slime.config.peft_files import DOWN, GATE_UP, LORA_A, LORA_B, flat_name
from slime.core.errors import UserError

_WEIGHT = ".weight"
_DELTA_NET = (".in_proj.", ".out_proj.")


@dataclass(frozen=True, kw_only=True)
class AdapterMap:
    """The modules of the whole model that have adapters, and the rules of the adapters."""

    modules: list[str]  # Hugging Face names
    weights: WeightMap


def adapter_map(weights: WeightMap, lora: LoraConfig, config: TransformerConfig) -> AdapterMap:
    """Return the adapters of a model; raise ConfigError for modules that it does not have."""
    weights = replace(weights, rules=tuple(map(_flat, weights.rules)))
    linear: list[str] = []
    experts: list[str] = []
    for rule, layer in weights.in_layer_order():
        if _is_linear(rule) and _is_in_layer(rule, layer, config):
            if rule.per_expert:
                experts.append(_expert_parameter(rule.hf_names(layer)[0], rule))
            else:
                linear += (name.removesuffix(_WEIGHT) for name in rule.hf_names(layer))
    modules = lora.targets(linear, experts)
    ends = {module.rpartition(".")[2] for module in modules}
    rules = [
        adapter
        for rule in weights.rules
        if _is_linear(rule)
        for adapter in (_of_experts(rule, lora) if rule.per_expert else _adapters(rule))
        if leaf_of(adapter.megatron) in ends
    ]
    own = replace(weights, rules=tuple(rules), untrained=(), copies={}, of_adapters=True)
    return AdapterMap(modules=modules, weights=own)


def _flat(rule: Rule) -> Rule:
    """Return the rule with the names of the text model alone, also beside a vision tower."""
    return replace(rule, hf=tuple(map(flat_name, rule.hf)))


def leaf_of(name: str) -> str:
    """Return `q_proj` of ...linear_qkv.lora.q_proj.lora_A."""
    return name.split(".")[-2]


class TensorsReader:
    """A `TensorReader` of tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise UserError(f"the adapter to load (PEFT folder or checkpoint) has no tensor {name}")
        return tuple(self._tensors[name].shape)

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        return self._tensors[name][slices] if slices else self._tensors[name]


def _is_linear(rule: Rule) -> bool:
    """Return whether it is a linear weight of a decoder layer: no router, no embedding.

    Experts that a checkpoint holds in one tensor are transposed and have biases: no adapters.
    """
    layer = any(part in rule.megatron for part in (".linear_", *_DELTA_NET))
    linear = layer and rule.megatron.endswith(_WEIGHT)
    return linear and rule.per_layer and not rule.is_mtp and not rule.stacked


def _is_in_layer(rule: Rule, layer: int, config: TransformerConfig) -> bool:
    """Return whether this layer has the weight; a family's rules cover layers of every kind."""
    if ".mlp." not in rule.megatron:
        is_delta_net = any(part in rule.megatron for part in _DELTA_NET)
        return is_delta_net == is_linear(config, layer)
    sparse = bool(config.num_moe_experts) and bool(
        layer_pattern(config.moe_layer_freq, config.num_layers)[layer]
    )
    return sparse == (".experts." in rule.megatron or ".shared_experts." in rule.megatron)


def _adapters(rule: Rule) -> Iterator[Rule]:
    linear, dim = rule.megatron.removesuffix(_WEIGHT), rule.mapping.dim
    of_a = Plain("row") if dim == 1 else Plain()
    for number, hf in enumerate(rule.hf):
        module = hf.removesuffix(_WEIGHT)
        own = f"{linear}{ADAPTERS}{module.rpartition('.')[2]}"
        yield Rule(f"{own}.lora_A", (module + LORA_A,), of_a)
        yield Rule(f"{own}.lora_B", (module + LORA_B,), rule.mapping.part(number))


def _of_experts(rule: Rule, lora: LoraConfig) -> Iterator[Rule]:
    """Yield the rules of A and B of all experts of a layer; `Plain` is a matrix that they share."""
    parameter = _expert_parameter(rule.hf[0], rule)
    is_first, shared = parameter.endswith(GATE_UP), lora.experts_shared_outer
    of_a = ExpertMatrices() if is_first else ExpertMatrices("row")
    of_b = ExpertMatrices("column", gated=True) if is_first else ExpertMatrices()
    owner = rule.megatron.partition(".local_experts.")[0]
    for side, name, mapping in (("lora_A", LORA_A, of_a), ("lora_B", LORA_B, of_b)):
        is_shared = shared and is_first == (side == "lora_A")
        yield Rule(
            f"{owner}{ADAPTERS}{parameter.rpartition('.')[2]}.{side}",
            (parameter + name,),
            Plain() if is_shared else mapping,
            all_experts=not is_shared,
        )


def _expert_parameter(hf_name: str, rule: Rule) -> str:
    """Return `...mlp.experts.gate_up_proj` for the name of one expert's weight."""
    leaf = GATE_UP if isinstance(rule.mapping, GateUp) else DOWN
    return f"{hf_name.rpartition('.experts.')[0]}.experts.{leaf}"
