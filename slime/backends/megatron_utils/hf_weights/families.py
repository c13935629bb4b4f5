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
from slime.backends.megatron_utils.hf_weights.mappings import (
    GateUp,
    InterleavedGateUp,
    Mapping,
    Plain,
    Qkv,
    Sharding,
    StackedExperts,
    SwappedInputs,
    Vocab,
)
from slime.backends.megatron_utils.hf_weights.rules import Rule, WeightMap
from slime.backends.megatron_utils.model_config import padded_vocab_size, trained_mtp_layers

if TYPE_CHECKING:
    from slime.config.arguments import Args

# Prefixes of a layer and of an expert: Megatron's, Hugging Face's.
M, H = "decoder.layers.{layer}.", "model.layers.{layer}."
_EXPERT = "mlp.experts.local_experts.{expert}."


def weight_map(config: PretrainedConfig, args: Args) -> WeightMap:
    """Return the rules of a model; raise UserError for a model type that is not supported."""
    padded = padded_vocab_size(config.vocab_size, args)
    return padded_weight_map(config, padded, trained_mtp_layers(args))


def padded_weight_map(
    config: PretrainedConfig, padded_vocab: int, mtp_layers: int = 0
) -> WeightMap:
    """Return the rules of a model whose embedding is padded to `padded_vocab` rows.

    Of its multi-token-prediction layers, the first `mtp_layers` are parameters of Megatron's model.
    """
    architecture(config)  # UserError, with the supported model types, for any other
    family = _FAMILIES[config.model_type]
    first, *last = _ends(config, padded_vocab)
    rules = family.layer_rules(config)
    mtp = family.mtp
    return WeightMap(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        rules=(first, *rules, *last, *(mtp.rules(config, rules, mtp_layers) if mtp else ())),
        untrained=mtp.prefixes(config)[mtp_layers:] if mtp else (),
        copies=mtp.copies(config, mtp_layers) if mtp else {},
    )


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
    """The rules of one decoder layer, and names of multi-token-prediction layers if it has such."""

    layer_rules: Callable[[PretrainedConfig], list[Rule]]
    mtp: Mtp | None = None


def _llama(config: PretrainedConfig) -> list[Rule]:
    return [*_attention(config), *_mlp()]


def _qwen2(config: PretrainedConfig) -> list[Rule]:
    return [*_attention(config, qkv_bias=True), *_mlp()]


def _qwen3(config: PretrainedConfig) -> list[Rule]:
    return [*_attention(config, qk_norm=True), *_mlp()]


def _qwen3_moe(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of Qwen3 with MoE in all layers or in some."""
    return [*_qwen3(config), *_experts()]


def _qwen2_moe(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of Qwen2 with MoE in all layers or in some, and a gated shared expert."""
    return [
        *_attention(config, qkv_bias=bool(config.qkv_bias)),
        *_mlp(),
        *_experts(),
        *_gated("mlp.shared_experts", "mlp.shared_expert"),
        _plain("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    ]


def _mimo(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of Qwen2, with biases or without."""
    return [*_attention(config, qkv_bias=bool(config.attention_bias)), *_mlp()]


def _glm4(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of GLM-4-0414: norms after attention and MLP too, gate and up fused."""
    return [
        *_attention(config, qkv_bias=bool(config.attention_bias)),
        _plain("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
        _plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        Rule(f"{M}mlp.linear_fc1.weight", (f"{H}mlp.gate_up_proj.weight",), GateUp(fused=True)),
        _plain("mlp.linear_fc2.weight", "mlp.down_proj.weight", "row"),
        _plain("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
    ]


def _glm4_moe(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of GLM-4.5: dense layers first, then MoE with a shared expert."""
    return [
        *_attention(config, qkv_bias=bool(config.attention_bias), qk_norm=bool(config.use_qk_norm)),
        *_mlp(),
        *_expert_bias(),
        *_experts(),
        *_shared_experts(),
    ]


def _deepseek_v3(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of MLA, dense layers first, then MoE with shared experts (GLM-4.7-Flash too)."""
    return [
        *_latent_attention(config),
        *_mlp(),
        *_expert_bias(),
        *_experts(),
        *_shared_experts(),
    ]


def _latent_attention(config: PretrainedConfig) -> list[Rule]:
    megatron, hf = "self_attention.", "self_attn."
    if config.q_lora_rank is None:
        query = [_plain(f"{megatron}linear_q_proj.weight", f"{hf}q_proj.weight", "column")]
    else:
        query = [
            _plain(f"{megatron}linear_q_down_proj.weight", f"{hf}q_a_proj.weight"),
            _plain(f"{megatron}q_layernorm.weight", f"{hf}q_a_layernorm.weight"),
            _plain(f"{megatron}linear_q_up_proj.weight", f"{hf}q_b_proj.weight", "column"),
        ]
    return [
        _plain("input_layernorm.weight", "input_layernorm.weight"),
        *query,
        _plain(f"{megatron}linear_kv_down_proj.weight", f"{hf}kv_a_proj_with_mqa.weight"),
        _plain(f"{megatron}kv_layernorm.weight", f"{hf}kv_a_layernorm.weight"),
        _plain(f"{megatron}linear_kv_up_proj.weight", f"{hf}kv_b_proj.weight", "column"),
        _plain(f"{megatron}linear_proj.weight", f"{hf}o_proj.weight", "row"),
    ]


def _gpt_oss(config: PretrainedConfig) -> list[Rule]:
    """Return the rules of attention with sinks, biases everywhere, experts stacked by HF."""
    return [
        *_attention(config, qkv_bias=True),
        _plain("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
        _plain("self_attention.core_attention.softmax_offset", "self_attn.sinks", "column"),
        _plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        _plain("mlp.router.weight", "mlp.router.weight"),
        _plain("mlp.router.bias", "mlp.router.bias"),
        _stacked("linear_fc1.weight", "gate_up_proj", InterleavedGateUp()),
        _stacked("linear_fc1.bias", "gate_up_proj_bias", InterleavedGateUp()),
        _stacked("linear_fc2.weight", "down_proj", Plain("row")),
        _stacked("linear_fc2.bias", "down_proj_bias", Plain()),
    ]


def _stacked(megatron: str, hf: str, mapping: Mapping) -> Rule:
    return Rule(
        f"{M}{_EXPERT}{megatron}", (f"{H}mlp.experts.{hf}",), StackedExperts(mapping), stacked=True
    )


# ---- rules that families share


def _ends(config: PretrainedConfig, padded_vocab: int) -> list[Rule]:
    """Return the rules of the embedding, the final norm and the output layer."""
    vocab = Vocab(config.vocab_size, padded_vocab)
    tied = bool(config.tie_word_embeddings)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocab),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Plain()),
        Rule("output_layer.weight", (head,), vocab, load_only=tied),
    ]


def _attention(
    config: PretrainedConfig, *, qkv_bias: bool = False, qk_norm: bool = False
) -> list[Rule]:
    """Return the rules of attention and its input norm, with optional QKV biases and QK norms."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = ["weight", "bias"] if qkv_bias else ["weight"]
    rules = [_plain("input_layernorm.weight", "input_layernorm.weight")]
    for kind in kinds:
        names = tuple(f"{H}self_attn.{x}_proj.{kind}" for x in "qkv")
        rules.append(Rule(f"{M}self_attention.linear_qkv.{kind}", names, Qkv(groups, head_dim)))
    if qk_norm:
        for x in "qk":
            rules.append(
                _plain(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight")
            )
    rules.append(_plain("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "row"))
    return rules


def _mlp() -> list[Rule]:
    return [
        _plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        *_gated("mlp", "mlp"),
    ]


def _experts() -> list[Rule]:
    """Return the rules of the router and of each expert; the norm before them is in `_mlp`."""
    return [
        _plain("mlp.router.weight", "mlp.gate.weight"),
        *_gated("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"),
    ]


def _shared_experts() -> list[Rule]:
    return _gated("mlp.shared_experts", "mlp.shared_experts")


def _expert_bias() -> list[Rule]:
    """Return the rule of the bias that is added to router scores for the top-k."""
    hf = (f"{H}mlp.gate.e_score_correction_bias",)
    return [Rule(f"{M}mlp.router.expert_bias", hf, Plain(), fp32=True)]


def _plain(megatron: str, hf: str, sharding: Sharding = None) -> Rule:
    """Return the rule of a tensor of a layer that is the same in Hugging Face and Megatron."""
    return Rule(M + megatron, (H + hf,), Plain(sharding))


def _gated(megatron: str, hf: str) -> list[Rule]:
    names = (f"{H}{hf}.gate_proj.weight", f"{H}{hf}.up_proj.weight")
    return [
        Rule(f"{M}{megatron}.linear_fc1.weight", names, GateUp()),
        _plain(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", "row"),
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
}
