"""Models the FSDP trainer would silently get wrong are refused when they are built."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    PreTrainedModel,
)

from slime.backends.fsdp_utils.model import (
    PACKED_ATTENTION,
    HeadOptions,
    PackedCausalLM,
    check_head,
    refuse_unpackable,
)
from slime.core.errors import UserError

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


def _make(config, **options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **options)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_ordinary_model_passes(temperature: float):
    hf = _make(LlamaConfig(**SIZES), attn_implementation=PACKED_ATTENTION)
    refuse_unpackable(hf)
    model = PackedCausalLM(hf, HeadOptions(temperature=temperature, chunk_size=16))
    check_head(model, torch.device("cpu"))


def test_scaled_logits_are_refused():
    config = GraniteConfig(**SIZES, logits_scaling=8.0, initializer_range=1.0)
    hf = _make(config, attn_implementation=PACKED_ATTENTION)
    with pytest.raises(UserError, match=r"GraniteForCausalLM changes its logits"):
        check_head(
            PackedCausalLM(hf, HeadOptions(temperature=1.0, chunk_size=16)), torch.device("cpu")
        )


def test_capped_attention_is_refused():
    hf = _make(Gemma2Config(**SIZES), attn_implementation=PACKED_ATTENTION)
    with pytest.raises(UserError, match="softcap"):
        check_head(
            PackedCausalLM(hf, HeadOptions(temperature=1.0, chunk_size=16)), torch.device("cpu")
        )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            MiniMaxConfig(
                **SIZES,
                num_local_experts=2,
                num_experts_per_tok=1,
                layer_types=["linear_attention", "full_attention"],
            ),
            "layers of type linear_attention",
        ),
        (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1), "recurrent|attention"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2), "attention interface"),
    ],
    ids=["linear_attention", "recurrent", "own_attention"],
)
def test_models_that_would_mix_samples_are_refused(config, reason):
    with pytest.raises(UserError, match=reason):
        refuse_unpackable(_make(config))
