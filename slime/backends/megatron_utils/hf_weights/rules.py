"""`Rule`: one entry of a family's weight map. `WeightMap`: all rules of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from slime.backends.megatron_utils.hf_weights.mappings import Mapping

ADAPTERS = ".lora."  # in the name of an adapter: ...linear_qkv.lora.q_proj.lora_A


@dataclass(frozen=True)
class Rule:
    """A Megatron parameter and the Hugging Face tensors it is made of.

    Names are those of a model on one rank; `{layer}` and `{expert}` are global indices::

        Rule("decoder.layers.{layer}.mlp.linear_fc1.weight",
             ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
             GateUp())

    Expert-tensor parallelism shards the routed experts, tensor parallelism all other parameters.
    """

    megatron: str
    hf: tuple[str, ...]
    mapping: Mapping
    stacked: bool = False  # the Hugging Face tensors hold all experts
    all_experts: bool = False  # the parameter holds all experts of a rank
    load_only: bool = False  # exported under another rule
    fp32: bool = False  # float32, whatever the dtype of the model

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.megatron

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.megatron

    @property
    def of_experts(self) -> bool:
        return self.per_expert or self.all_experts

    @property
    def is_mtp(self) -> bool:
        """Whether it belongs to a multi-token-prediction layer."""
        return self.megatron.startswith("mtp.")

    def name(self, layer: int = 0, expert: int = 0) -> str:
        return self.megatron.format(layer=layer, expert=expert)

    def hf_names(self, layer: int = 0, expert: int = 0) -> list[str]:
        return [name.format(layer=layer, expert=expert) for name in self.hf]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(self.megatron)))


@dataclass(frozen=True, kw_only=True)
class Match:
    """A rule with the layer and expert of a name that matched it."""

    rule: Rule
    layer: int = 0
    expert: int = 0

    @property
    def hf_names(self) -> list[str]:
        return self.rule.hf_names(self.layer, self.expert)


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """All rules of one model; `untrained` are prefixes of tensors that Megatron does not hold.

    `copies` are further names under which a checkpoint may hold a tensor: {copy: original}.
    """

    model_type: str
    num_layers: int
    rules: tuple[Rule, ...]
    untrained: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    of_adapters: bool = False  # the rules are those of LoRA adapters instead of the base weights

    @property
    def is_tied(self) -> bool:
        """Return whether the output layer has the weights of the embedding."""
        return any(rule.megatron == "output_layer.weight" and rule.load_only for rule in self.rules)

    def match(self, name: str) -> Match | None:
        """Return the match of a Megatron name with global layer and expert indices."""
        name = canonical(name)
        for rule in self.rules:
            found = rule.pattern.fullmatch(name)
            if found:
                numbers = {field: int(value) for field, value in found.groupdict().items()}
                return Match(rule=rule, **numbers)
        return None

    def in_layer_order(self) -> Iterator[tuple[Rule, int]]:
        """Yield rules with their layer: the embedding, all layers, then the final norm and head."""
        first = list(takewhile(lambda rule: not rule.per_layer, self.rules))
        rest = self.rules[len(first) :]
        yield from ((rule, 0) for rule in first)
        for layer in range(self.num_layers):
            yield from ((rule, layer) for rule in rest if rule.per_layer)
        yield from ((rule, 0) for rule in rest if not rule.per_layer)

    def is_untrained(self, hf_name: str) -> bool:
        return hf_name.startswith(self.untrained) or hf_name.endswith("rotary_emb.inv_freq")


def canonical(name: str) -> str:
    """Rename weights of TransformerEngine's layers to the names in megatron-core's own layers."""
    for pattern, replacement in _TRANSFORMER_ENGINE:
        name = pattern.sub(replacement, name)
    return name


_TRANSFORMER_ENGINE = [
    (
        re.compile(r"self_attention\.(linear_qkv|linear_q_proj|in_proj)\.layer_norm_weight$"),
        "input_layernorm.weight",
    ),
    (
        re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$"),
        r"self_attention.\1_layernorm.weight",
    ),
    (re.compile(r"\bmlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (
        re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)$"),
        r"mlp.experts.local_experts.\3.linear_fc\1.\2",
    ),
]
