"""Log-probs of a model in training mode are the same in every pass, whatever randomness its config asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from slime.rollout.train_data import split_batch
from tests.fsdp import Case, make_rows, start_actor
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import VOCAB_SIZE, make_byte_tokenizer

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
_PADDED = {"qkv_format": "bshd", "micro_batch_size": 5}
# configuration, model, flags
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (
        LlamaConfig(**_SIZES, attention_dropout=0.1),
        LlamaForCausalLM,
        {"attn_implementation": "sdpa"},
    ),
    "mixtral": (MixtralConfig(**_SIZES, **_MOE), MixtralForCausalLM, {}),
    "phimoe": (PhimoeConfig(**_SIZES, **_MOE, input_jitter_noise=0.1), PhimoeForCausalLM, {}),
    # Its layers read the probabilities from the config.
    "falcon": (
        FalconConfig(**_SIZES, attention_dropout=0.1, hidden_dropout=0.1),
        FalconForCausalLM,
        {**_PADDED, "attn_implementation": "sdpa"},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("models")
    return {name: _case(folder / name, *parts) for name, parts in MODELS.items()}


def _case(folder: Path, config: Any, model_class: Any, flags: dict[str, Any]) -> Case:
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return Case(model=str(folder), flags={"micro_batch_size": 5, **flags})


@pytest.mark.parametrize("name", MODELS)
def test_two_passes_in_training_mode_give_equal_log_probs(models, name):
    (found,) = run_fsdp_ranks(_two_passes, 1, models[name])
    assert found["training"]
    for first, second in zip(*found["passes"], strict=True):
        np.testing.assert_array_equal(first, second)


def test_phimoe_routes_in_training_as_in_generation(models):
    """Its jitter is also the width of the threshold below which experts are masked, so it must stay."""
    (found,) = run_fsdp_ranks(_two_passes, 1, models["phimoe"])
    hf = PhimoeForCausalLM.from_pretrained(models["phimoe"].model).eval()
    rows = make_rows()
    for tokens, mask, column in zip(rows.tokens, rows.loss_masks, found["passes"][0], strict=True):
        ids = torch.from_numpy(tokens)[None]
        with torch.no_grad():
            log_probs = torch.log_softmax(hf(ids).logits[0].float(), -1)
        expected = log_probs[:-1].gather(1, ids[0, 1:, None])[-len(column) :, 0]
        np.testing.assert_allclose(column[mask > 0], expected.numpy()[mask > 0], atol=2e-5)


def _two_passes(rank: int, case: Case) -> dict[str, Any]:
    args = case.args()
    actor = start_actor(args, rank, 1)
    batch = split_batch(args, make_rows(), dp_size=1, cp_size=1)[0]
    passes = [actor.log_probs(batch, "actor") for _ in range(2)]
    return {"passes": passes, "training": actor.model.module.hf.training}
