"""The weight map of each model type: a `Family` holds the rules of its layers.

To add a family, add its entry to `_FAMILIES` (a mapping of its own goes into `mappings.py`) and its
configuration to `architecture.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from slime.backends.megatron_utils.architecture import architecture
from slime.backends.megatron_utils.hf_weights.layer_rules import (
    H,
    M,
    attention,
    biased_experts,
    ends,
    experts,
    fused_experts,
    gated_shared_expert,
    mlp,
    plain,
    stacked,
)
from slime.backends.megatron_utils.hf_weights.mappings import (
    GateUp,
    InterleavedGateUp,
    Mapping,
    Plain,
    SwappedInputs,
)
from slime.backends.megatron_utils.hf_weights.rules import Rule, WeightMap
from slime.backends.megatron_utils.hf_weights.sections import Sections
from slime.backends.megatron_utils.model_config import padded_vocab_size, trained_mtp_layers
from slime.backends.megatron_utils.vision import TOWER, tower_rules
from slime.config.checks.model_types import trains_tower
from slime.config.peft_files import nested_name
from slime.weights.buckets import StoredNames, stored_names

if TYPE_CHECKING:
    from slime.config.arguments import Args


def weight_map(config: PretrainedConfig, args: Args) -> WeightMap:
    """Return the rules of a model; raise UserError for a model type that is not supported."""
    padded = padded_vocab_size(config.vocab_size, args)
    stored = stored_names(args.hf_checkpoint, config.model_type)
    weights = padded_weight_map(config, padded, trained_mtp_layers(args), stored)
    return with_tower(weights, args.hf_checkpoint) if trains_tower(args) else weights


def with_tower(weights: WeightMap, folder: str) -> WeightMap:
    """Return the rules with those of a trained vision tower."""
    return replace(
        weights,
        rules=(*weights.rules, *tower_rules(folder)),
        untrained=tuple(prefix for prefix in weights.untrained if prefix != TOWER),
    )


def padded_weight_map(
    config: PretrainedConfig,
    padded_vocab: int,
    mtp_layers: int = 0,
    stored: StoredNames = StoredNames(),  # noqa: B008
) -> WeightMap:
    """Return the rules of a model whose embedding is padded to `padded_vocab` rows.

    Of its multi-token-prediction layers, the first `mtp_layers` are parameters of Megatron's model.
    """
    architecture(config)  # UserError, with the supported model types, for any other
    family = _FAMILIES[config.model_type]
    first, *last = ends(config, padded_vocab)
    rules = family.layer_rules(config)
    if stored.fused_experts:
        fused = fused_experts(transposed=bool(stored.transposed))
        rules = [*(rule for rule in rules if not rule.per_expert), *fused]
    mtp = family.mtp
    whole = (first, *rules, *last, *(mtp.rules(config, rules, mtp_layers) if mtp else ()))
    return WeightMap(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        rules=tuple(_nested(rule) for rule in whole) if stored.nested else whole,
        untrained=(mtp.prefixes(config)[mtp_layers:] if mtp else ()) + family.untrained,
        copies=mtp.copies(config, mtp_layers) if mtp else {},
    )


def _nested(rule: Rule) -> Rule:
    """Return the rule with the names that a text model has beside a vision tower."""
    return replace(rule, hf=tuple(nested_name(name) for name in rule.hf))


@dataclass(frozen=True, kw_only=True)
class Mtp:
    """Hugging Face names of multi-token-prediction layers: DeepSeek's, except where given."""

    prefix: str = ""  # with {layer}; default: that of a decoder layer, numbered after the last
    enorm: str = "enorm"  # of the embedding of the next token
    hnorm: str = "hnorm"  # of the hidden state
    eh_proj: str = "eh_proj"  # from both, side by side, to a hidden state
    final_layernorm: str = "shared_head.norm"
    hidden_first: bool = False  # in the input of eh_proj

    def prefixes(self, config: PretrainedConfig) -> tuple[str, ...]:
        count = getattr(config, "num_nextn_predict_layers", None) or 1
        if self.prefix:
            return tuple(self.prefix.format(layer=layer) for layer in range(count))
        first = config.num_hidden_layers
        return tuple(H.format(layer=layer) for layer in range(first, first + count))

    def rules(
        self, config: PretrainedConfig, decoder: list[Rule], num_layers: int
    ) -> Iterator[Rule]:
        """Yield the rules of the first layers; each has a decoder layer of the model inside."""
        for layer, hf in enumerate(self.prefixes(config)[:num_layers]):
            own = f"mtp.layers.{layer}."
            for name in ("enorm", "hnorm", "final_layernorm"):
                yield Rule(f"{own}{name}.weight", (f"{hf}{getattr(self, name)}.weight",), Plain())
            both = SwappedInputs() if self.hidden_first else Plain("column")
            yield Rule(f"{own}eh_proj.weight", (f"{hf}{self.eh_proj}.weight",), both)
            for rule in decoder:
                yield replace(
                    rule,
                    megatron=rule.megatron.replace(M, f"{own}transformer_layer."),
                    hf=tuple(name.replace(H, hf) for name in rule.hf),
                )

    def copies(self, config: PretrainedConfig, num_layers: int) -> dict[str, str]:
        """Return the copies that a checkpoint may have of the embedding and the output layer."""
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        shared = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": head}
        return {
            f"{hf}{name}.weight": original
            for hf in self.prefixes(config)[:num_layers]
            for name, original in shared.items()
        }


@dataclass(frozen=True)
class Family:
    """The rules of one decoder layer, and names of its multi-token-prediction layers, if any.

    `untrained` are prefixes of tensors that a checkpoint may have and Megatron's model does not.
    """

    layer_rules: Callable[[PretrainedConfig], list[Rule]]
    mtp: Mtp | None = None
    untrained: tuple[str, ...] = ()


def _llama(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config), *mlp()]


def _qwen2(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config, qkv_bias=True), *mlp()]


def _qwen3(config: PretrainedConfig) -> list[Rule]:
    return [*attention(config, qk_norm=True), *mlp()]


def _qwen3_moe(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of Qwen3 with MoE in all layers or in some."""
    return [*_qwen3(config), *experts()]


def _qwen2_moe(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of Qwen2 with MoE in all layers or in some, and a gated shared expert."""
    return [
        *attention(config, qkv_bias=bool(config.qkv_bias)),
        *mlp(),
        *experts(),
        *gated_shared_expert(),
    ]


def _qwen3_next(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of gated delta nets, gated attention, MoE and a gated shared expert."""
    keys = config.linear_num_key_heads
    qk, v, heads = _delta_rows(config)
    mixed = Sections([qk, qk, v, v], [heads, heads], groups=keys)
    names = ("in_proj_qkvz", "in_proj_ba")
    return [*_hybrid(config, names, mixed), *mlp(), *experts(), *gated_shared_expert()]


def _qwen3_5(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of gated delta nets, gated attention and a dense MLP."""
    qk, v, heads = _delta_rows(config)
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return [*_hybrid(config, names, Sections([qk, qk, v], [v], [heads], [heads])), *mlp()]


def _qwen3_5_moe(config: PretrainedConfig) -> list[Rule]:
    return [*_qwen3_5(config), *experts(), *gated_shared_expert()]


def _hybrid(config: PretrainedConfig, in_proj: tuple[str, ...], mixed: Mapping) -> list[Rule]:
    """Return the rules of attention and of delta nets, of which each layer has one."""
    qk, v, _ = _delta_rows(config)
    own, hf = "self_attention.", "linear_attn."
    names = tuple(f"{H}{hf}{name}.weight" for name in in_proj)
    return [
        *attention(config, qk_norm=True, gated=True),
        Rule(f"{M}{own}in_proj.weight", names, mixed),
        Rule(f"{M}{own}conv1d.weight", (f"{H}{hf}conv1d.weight",), Sections([qk, qk, v])),
        plain(f"{own}A_log", f"{hf}A_log", "column"),
        plain(f"{own}dt_bias", f"{hf}dt_bias", "column"),
        plain(f"{own}out_norm.weight", f"{hf}norm.weight"),
        plain(f"{own}out_proj.weight", f"{hf}out_proj.weight", "row"),
    ]


def _delta_rows(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return the rows of queries (and of keys), of values, and of one number per value head."""
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, heads * config.linear_value_head_dim, heads


def _mimo(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of Qwen2, with biases or without."""
    return [*attention(config, qkv_bias=bool(config.attention_bias)), *mlp()]


def _glm4(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of GLM-4-0414: norms after attention and MLP too, gate and up fused."""
    return [
        *attention(config, qkv_bias=bool(config.attention_bias)),
        plain("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
        plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        Rule(f"{M}mlp.linear_fc1.weight", (f"{H}mlp.gate_up_proj.weight",), GateUp(fused=True)),
        plain("mlp.linear_fc2.weight", "mlp.down_proj.weight", "row"),
        plain("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
    ]


def _glm4_moe(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of GLM-4.5: dense layers first, then MoE with a shared expert."""
    return [
        *attention(config, qkv_bias=bool(config.attention_bias), qk_norm=bool(config.use_qk_norm)),
        *mlp(),
        *biased_experts(),
    ]


def _deepseek_v3(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of MLA, dense layers first, then MoE with shared experts (GLM-4.7-Flash too)."""
    return [*_latent_attention(config), *mlp(), *biased_experts()]


def _latent_attention(config: PretrainedConfig) -> list[Rule]:
    megatron, hf = "self_attention.", "self_attn."
    if config.q_lora_rank is None:
        query = [plain(f"{megatron}linear_q_proj.weight", f"{hf}q_proj.weight", "column")]
    else:
        query = [
            plain(f"{megatron}linear_q_down_proj.weight", f"{hf}q_a_proj.weight"),
            plain(f"{megatron}q_layernorm.weight", f"{hf}q_a_layernorm.weight"),
            plain(f"{megatron}linear_q_up_proj.weight", f"{hf}q_b_proj.weight", "column"),
        ]
    return [
        plain("input_layernorm.weight", "input_layernorm.weight"),
        *query,
        plain(f"{megatron}linear_kv_down_proj.weight", f"{hf}kv_a_proj_with_mqa.weight"),
        plain(f"{megatron}kv_layernorm.weight", f"{hf}kv_a_layernorm.weight"),
        plain(f"{megatron}linear_kv_up_proj.weight", f"{hf}kv_b_proj.weight", "column"),
        plain(f"{megatron}linear_proj.weight", f"{hf}o_proj.weight", "row"),
    ]


def _gpt_oss(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of attention with sinks, biases everywhere, experts stacked by HF."""
    return [
        *attention(config, qkv_bias=True),
        plain("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
        plain("self_attention.core_attention.softmax_offset", "self_attn.sinks", "column"),
        plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        plain("mlp.router.weight", "mlp.router.weight"),
        plain("mlp.router.bias", "mlp.router.bias"),
        stacked("linear_fc1.weight", "gate_up_proj", InterleavedGateUp()),
        stacked("linear_fc1.bias", "gate_up_proj_bias", InterleavedGateUp()),
        stacked("linear_fc2.weight", "down_proj", Plain("row")),
        stacked("linear_fc2.bias", "down_proj_bias", Plain()),
    ]


_FAMILIES = {
    "llama": Family(_llama),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3),
    "mimo": Family(
        _mimo,
        Mtp(
            prefix="model.mtp_layers.{layer}.",
            enorm="token_layernorm",
            hnorm="hidden_layernorm",
            eh_proj="input_proj",
            final_layernorm="final_layernorm",
            hidden_first=True,
        ),
    ),
    "glm4": Family(_glm4),
    "gpt_oss": Family(_gpt_oss),
    "qwen2_moe": Family(_qwen2_moe),
    "qwen3_moe": Family(_qwen3_moe),
    "glm4_moe": Family(_glm4_moe, Mtp()),
    "glm4_moe_lite": Family(_deepseek_v3, Mtp()),
    "deepseek_v3": Family(_deepseek_v3, Mtp()),
    "qwen3_vl_text": Family(_qwen3, untrained=("model.visual.",)),
    "qwen3_vl_moe_text": Family(_qwen3_moe, untrained=("model.visual.",)),
    "qwen3_next": Family(_qwen3_next, untrained=("mtp.",)),
    "qwen3_5_text": Family(_qwen3_5, untrained=("mtp.", "model.visual.")),
    "qwen3_5_moe_text": Family(_qwen3_5_moe, untrained=("mtp.", "model.visual.")),
}
