"""Models of many families, each with some turn of attention of its own, against Hugging Face."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slime.core.errors import UserError
from tests.engines import local_engine
from tests.tiny import make_tiny_checkpoint

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
FAMILIES = {
    "gpt2": {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "mistral": {**COMMON, "sliding_window": 8},
    "qwen2": COMMON,  # biases of query, key and value
    "llama": {
        **COMMON,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma2": {
        **COMMON,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
    },  # capped scores
    "gpt_oss": {
        **COMMON,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },  # sinks
    "afmoe": {
        **COMMON,
        "head_dim": 16,
        "sliding_window": 8,
    },  # takes a view of what attention gives
    "deepseek_v3": {
        **COMMON,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        **MLA,
        **ROUTED,
    },
    "glm4_moe_lite": {**COMMON, "num_key_value_heads": 4, **MLA, **ROUTED, "n_group": 1},
    "qwen2_moe": {
        **COMMON,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },  # a shared expert with a gate
}


def make_model(path: Path, family: str, **config) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases are made as 0, norms as 1
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tmp_path: Path):
    model = make_model(tmp_path, family, **FAMILIES[family])
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(n)] for n in (5, 40, 23)]
    with local_engine(tmp_path, skip_tokenizer_init=True) as engine:
        engine.generate(prompts[:1], temperature=0, max_new_tokens=2)  # alone, without padding
        engine.generate(prompts, temperature=0, max_new_tokens=2)
        requests = engine.generate(prompts, temperature=0, max_new_tokens=16, ignore_eos=True)
    assert sum(r.num_cached for r in requests) == 32 + 16
    for request in requests:
        with torch.no_grad():
            logits = model(torch.tensor([request.token_ids])).logits[0, request.prompt_len - 1 : -1]
        expected = logits.float().log_softmax(-1)
        assert request.output_ids == expected.argmax(-1).tolist()
        chosen = expected[range(16), request.output_ids]
        assert (chosen - torch.tensor(request.output_log_probs)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        (
            "bloom",
            {"vocab_size": 320, "hidden_size": 64, "n_layer": 1, "n_head": 4},
            "attention interface",
        ),
        (
            "mamba",
            {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 1},
            "linear_attention",
        ),
        (
            "gpt_neo",
            {
                **COMMON,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
            },
            "attention interface",
        ),
        ("diffllama", COMMON, "attends twice"),
        # Recurrent layers beside attention, which no list of layer kinds names.
        ("recurrent_gemma", {**COMMON, "num_hidden_layers": 3, "head_dim": 16}, "other log-probs"),
        ("phi3", {**COMMON, **LONGROPE}, "--context-length 64"),
    ],
)
def test_models_it_cannot_serve_are_refused_in_one_sentence(
    family: str, config: dict, message: str, tmp_path: Path
):
    make_model(tmp_path, family, **config)
    with pytest.raises(UserError, match=message), local_engine(tmp_path, skip_tokenizer_init=True):
        pass


def test_longrope_within_its_short_factors(tmp_path: Path):
    model = make_model(tmp_path, "phi3", **COMMON, **LONGROPE)
    prompt = [3 + i for i in range(50)]
    with local_engine(tmp_path, skip_tokenizer_init=True, context_length=64) as engine:
        (request,) = engine.generate([prompt], temperature=0, max_new_tokens=14, ignore_eos=True)
    with torch.no_grad():
        expected = model(torch.tensor([request.token_ids])).logits[0, 49:-1].log_softmax(-1)
    chosen = expected[range(14), request.output_ids]
    assert (chosen - torch.tensor(request.output_log_probs)).abs().max() < 1e-4


def test_a_checkpoint_without_some_weights_is_refused(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with (
        pytest.raises(
            UserError, match=r"1 tensors are missing, such as model.layers.1.mlp.up_proj"
        ),
        local_engine(path),
    ):
        pass


def test_weights_of_another_size_are_refused(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path / "m")
    other = make_tiny_checkpoint(tmp_path / "n", hidden_size=32)
    (other / "model.safetensors").replace(path / "model.safetensors")
    with pytest.raises(UserError, match="--model-path"), local_engine(path):
        pass


def test_context_longer_than_the_models_is_refused(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path / "m")
    with pytest.raises(UserError, match="512 positions"), local_engine(path, context_length=1024):
        pass


def test_an_error_in_a_step_fails_the_requests_and_is_kept(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path / "m")
    with local_engine(path) as local:
        engine = local.engine
        assert engine.runner.cache is not None
        engine.call(engine.runner.cache.free).result()  # the memory goes away under the engine
        with pytest.raises(AssertionError):
            local.generate([[1, 2, 3]], max_new_tokens=4)
        assert isinstance(engine.failure, KeyError)


def test_weights_that_are_not_numbers_fail_the_request(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with local_engine(path) as engine:
        (request,) = engine.generate([[1, 2, 3]], max_new_tokens=4)
    assert request.finish is not None and request.finish.status_code == 500
    assert "not a number" in request.finish.message


@pytest.mark.parametrize("deterministic", [False, True])
def test_numbers_gone_wrong_leave_nothing_behind(deterministic: bool, tmp_path: Path):
    """Pages that were filled with NaN are used again, most of them only in part."""
    make_model(tmp_path, "mistral", **{**FAMILIES["mistral"], "sliding_window": None})
    options = {"max_total_tokens": 64, "enable_deterministic_inference": deterministic}
    prompts = [[3, 4, 5], [6, 7]]
    with local_engine(tmp_path, skip_tokenizer_init=True, **options) as local:
        engine, weights = local.engine, dict(local.engine.runner.model.named_parameters())
        before = local.generate(prompts, temperature=0, max_new_tokens=4, ignore_eos=True)
        values = {name: w.clone() for name, w in weights.items() if "v_proj" in name}

        def set_weights(scale: float) -> None:
            for name, value in values.items():
                weights[name].data.copy_(value * scale)
            engine.weights_changed()

        engine.call(lambda: set_weights(float("nan")), exclusive=True).result()
        (failed,) = local.generate([list(range(3, 60))], max_new_tokens=4)
        engine.call(lambda: set_weights(1.0), exclusive=True).result()
        after = local.generate(prompts, temperature=0, max_new_tokens=4, ignore_eos=True)
    assert failed.finish is not None and failed.finish.status_code == 500
    assert [r.output_ids for r in after] == [r.output_ids for r in before]
