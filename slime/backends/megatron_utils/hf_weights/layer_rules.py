"""Rules of layers that several families share."""

from __future__ import annotations

from transformers import PretrainedConfig

from slime.backends.megatron_utils.hf_weights.mappings import (
    GateUp,
    Mapping,
    Plain,
    Qkv,
    Sharding,
    StackedExperts,
    Vocab,
)
from slime.backends.megatron_utils.hf_weights.rules import Rule
from slime.backends.megatron_utils.hf_weights.sections import GatedQkv

# Prefixes of a layer and of an expert: Megatron's, Hugging Face's.
M, H = "decoder.layers.{layer}.", "model.layers.{layer}."
_EXPERT = "mlp.experts.local_experts.{expert}."


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
    config: PretrainedConfig, *, qkv_bias: bool = False, qk_norm: bool = False, gated: bool = False
) -> list[Rule]:
    """Return the rules of attention and its input norm, with optional QKV biases, QK norms and gates."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    mapping = GatedQkv(groups, head_dim) if gated else Qkv(groups, head_dim)
    kinds = ["weight", "bias"] if qkv_bias else ["weight"]
    rules = [plain("input_layernorm.weight", "input_layernorm.weight")]
    for kind in kinds:
        names = tuple(f"{H}self_attn.{x}_proj.{kind}" for x in "qkv")
        rules.append(Rule(f"{M}self_attention.linear_qkv.{kind}", names, mapping))
    if qk_norm:
        for x in "qk":
            rules.append(
                plain(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight")
            )
    rules.append(plain("self_attention.linear_proj.weight", "self_attn.o_proj.weight", "row"))
    return rules


def mlp() -> list[Rule]:
    """Return the rules of a dense MLP and the norm before it; MoE layers use only the norm's."""
    return [
        plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        *gated_mlp("mlp", "mlp"),
    ]


def experts() -> list[Rule]:
    """Return the rules of the router and of each expert; the norm before them is in `mlp`."""
    return [
        plain("mlp.router.weight", "mlp.gate.weight"),
        *gated_mlp("mlp.experts.local_experts.{expert}", "mlp.experts.{expert}"),
    ]


def fused_experts(*, transposed: bool = False) -> list[Rule]:
    """Return the rules of experts that Hugging Face stacks as [experts, out, in], or transposed."""
    return [
        stacked("linear_fc1.weight", "gate_up_proj", GateUp(fused=True), transposed=transposed),
        stacked("linear_fc2.weight", "down_proj", Plain("row"), transposed=transposed),
    ]


def gated_shared_expert() -> list[Rule]:
    return [
        *gated_mlp("mlp.shared_experts", "mlp.shared_expert"),
        plain("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
    ]


def biased_experts() -> list[Rule]:
    """Return the rules of MoE with shared experts and a bias of router scores for the top-k."""
    hf = (f"{H}mlp.gate.e_score_correction_bias",)
    return [
        Rule(f"{M}mlp.router.expert_bias", hf, Plain(), fp32=True),
        *experts(),
        *gated_mlp("mlp.shared_experts", "mlp.shared_experts"),
    ]


def plain(megatron: str, hf: str, sharding: Sharding = None) -> Rule:
    """Return the rule of a tensor of a layer that is the same in Hugging Face and Megatron."""
    return Rule(M + megatron, (H + hf,), Plain(sharding))


def gated_mlp(megatron: str, hf: str) -> list[Rule]:
    names = (f"{H}{hf}.gate_proj.weight", f"{H}{hf}.up_proj.weight")
    return [
        Rule(f"{M}{megatron}.linear_fc1.weight", names, GateUp()),
        plain(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", "row"),
    ]


def stacked(megatron: str, hf: str, mapping: Mapping, *, transposed: bool = True) -> Rule:
    stacked = StackedExperts(mapping, transposed=transposed)
    return Rule(f"{M}{_EXPERT}{megatron}", (f"{H}mlp.experts.{hf}",), stacked, stacked=True)
