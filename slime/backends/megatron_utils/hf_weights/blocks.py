"""The rules that families share: embedding and head, attention, MLP, experts."""

from __future__ import annotations

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.mappings import Cut, GateUp, Plain, Qkv, Vocab
from slime.backends.megatron_utils.hf_weights.rules import Rule

M, H = "decoder.layers.{layer}.", "model.layers.{layer}."


def ends(config: PretrainedConfig, padded_vocab: int) -> list[Rule]:
    """Return the rules of the embedding, the final norm and the output layer."""
    vocab = Vocab(config.vocab_size, padded_vocab)
    tied = bool(config.tie_word_embeddings)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocab),
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Plain()),
        Rule("output_layer.weight", (head,), vocab, load_only=tied),
    ]


def attention(
    config: PretrainedConfig, *, qkv_bias: bool = False, qk_norm: bool = False
) -> list[Rule]:
    """Return the rules of attention and its input norm, with optional QKV biases and QK norms."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = ["weight", "bias"] if qkv_bias else ["weight"]
    rules = [plain("input_layernorm.weight", "input_layernorm.weight")]
    for kind in kinds:
        names = tuple(f"{H}self_attn.{x}_proj.{kind}" for x in "qkv")
        rules.append(Rule(f"{M}self_attention.linear_qkv.{kind}", names, Qkv(groups, head_dim)))
    if qk_norm:
        for x in "qk":
            rules.append(
                plain(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight")
            )
    rules.append(plain("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "row"))
    return rules


def mlp() -> list[Rule]:
    return [
        plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        *_gated("mlp", "mlp"),
    ]


def experts(*, router: str = "mlp.gate") -> list[Rule]:
    """Return the rules of the router and of each expert; the norm before them is in `mlp`."""
    return [
        plain("mlp.router.weight", f"{router}.weight"),
        *_gated("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"),
    ]


def shared_experts() -> list[Rule]:
    return _gated("mlp.shared_experts", "mlp.shared_experts")


def expert_bias() -> list[Rule]:
    """Return the rule of the bias that is added to router scores for the top-k."""
    hf = (f"{H}mlp.gate.e_score_correction_bias",)
    return [Rule(f"{M}mlp.router.expert_bias", hf, Plain(), fp32=True)]


def layers_behind_the_last(config: PretrainedConfig) -> tuple[str, ...]:
    """Return prefixes of multi-token-prediction layers, numbered after the last layer."""
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 1
    return tuple(f"model.layers.{layer}." for layer in range(first, first + count))


def plain(megatron: str, hf: str, cut: Cut = None) -> Rule:
    """Return the rule of a tensor of a layer that is the same in Hugging Face and Megatron."""
    return Rule(M + megatron, (H + hf,), Plain(cut))


def _gated(megatron: str, hf: str) -> list[Rule]:
    names = (f"{H}{hf}.gate_proj.weight", f"{H}{hf}.up_proj.weight")
    return [
        Rule(f"{M}{megatron}.linear_fc1.weight", names, GateUp()),
        plain(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", "row"),
    ]
