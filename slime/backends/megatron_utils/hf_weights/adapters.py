"""The rules of LoRA adapters, derived from those of the base weights.

Every Hugging Face module has an A and a B of its own, also where Megatron fuses several modules into
one linear layer. They are sharded like the layer: of a column-parallel one B by rows, of a
row-parallel one A by columns::

    decoder.layers.0.self_attention.linear_qkv.lora.q_proj.lora_A   model.layers.0.self_attn.q_proj.lora_A.weight
    decoder.layers.0.self_attention.linear_qkv.lora.q_proj.lora_B   model.layers.0.self_attn.q_proj.lora_B.weight
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.architecture import layer_pattern
from slime.backends.megatron_utils.hf_weights.mappings import GateUp, Mapping, Plain
from slime.backends.megatron_utils.hf_weights.rules import ADAPTERS, Rule, WeightMap
from slime.config.lora import LORA_A, LORA_B, LoraConfig
from slime.config.peft_files import refuse_experts
from slime.core.errors import UserError

_WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True)
class AdapterMap:
    """The modules of the whole model that have adapters, and the rules of these."""

    modules: list[str]  # Hugging Face names
    weights: WeightMap

    @property
    def names(self) -> list[str]:
        return [module + matrix for module in self.modules for matrix in (LORA_A, LORA_B)]


def adapter_map(weights: WeightMap, lora: LoraConfig, config: TransformerConfig) -> AdapterMap:
    """Return the adapters of a model; raise ConfigError for modules that it does not have."""
    linear: list[str] = []
    experts: list[str] = []
    for rule, layer in weights.in_layer_order():
        if _is_linear(rule) and _is_in_layer(rule, layer, config):
            found = experts if rule.per_expert else linear
            found += (name.removesuffix(_WEIGHT) for name in _names(rule, layer, config))
    refuse_experts(lora.target_modules, experts)
    modules = lora.targets(linear)
    ends = {module.rpartition(".")[2] for module in modules}
    rules = [
        adapter
        for rule in weights.rules
        if _is_linear(rule)
        for adapter in _adapters(rule)
        if leaf_of(adapter.megatron) in ends
    ]
    own = replace(weights, rules=tuple(rules), untrained=(), copies={}, of_adapters=True)
    return AdapterMap(modules=modules, weights=own)


def leaf_of(name: str) -> str:
    """Return `q_proj` of ...linear_qkv.lora.q_proj.lora_A."""
    return name.split(".")[-2]


def is_gate_up(mapping: Mapping) -> bool:
    """Return whether one Hugging Face module computes gate and up."""
    return isinstance(mapping, GateUp) and mapping.is_fused


class TensorsReader:
    """A `TensorReader` of tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise UserError(f"the adapter has no tensor {name}")
        return tuple(self._tensors[name].shape)

    def read(self, name: str, *slices: slice) -> torch.Tensor:
        return self._tensors[name][slices] if slices else self._tensors[name]


def _is_linear(rule: Rule) -> bool:
    """Return whether it is the weight of a linear layer of the decoder, so no router and no embedding."""
    linear = ".linear_" in rule.megatron and rule.megatron.endswith(_WEIGHT)
    return linear and rule.per_layer and not rule.is_mtp


def _is_in_layer(rule: Rule, layer: int, config: TransformerConfig) -> bool:
    """Return whether a layer has it: the rules of a family include dense and MoE layers."""
    if ".mlp." not in rule.megatron:
        return True
    sparse = bool(config.num_moe_experts) and bool(
        layer_pattern(config.moe_layer_freq, config.num_layers)[layer]
    )
    return sparse == (".experts." in rule.megatron or ".shared_experts." in rule.megatron)


def _names(rule: Rule, layer: int, config: TransformerConfig) -> Iterator[str]:
    for expert in range(config.num_moe_experts or 0) if rule.per_expert else (0,):
        yield from rule.hf_names(layer, expert)


def _adapters(rule: Rule) -> Iterator[Rule]:
    linear, dim = rule.megatron.removesuffix(_WEIGHT), rule.mapping.dim
    of_a = Plain("row") if dim == 1 else Plain()
    of_b: Mapping = Plain("column") if dim == 0 else Plain()
    if is_gate_up(rule.mapping):
        of_b = rule.mapping
    for hf in rule.hf:
        module = hf.removesuffix(_WEIGHT)
        own = f"{linear}{ADAPTERS}{module.rpartition('.')[2]}"
        yield Rule(f"{own}.lora_A", (module + LORA_A,), of_a)
        yield Rule(f"{own}.lora_B", (module + LORA_B,), of_b)
