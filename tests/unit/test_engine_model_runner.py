"""Which of the two execution paths a model takes, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime.engine.arguments import EngineArgs
from slime.engine.kernels.cpu_kernels import SOURCE, CpuKernels
from slime.engine.models.loading import eos_token_ids
from slime.engine.models.model_runner import find_kernels
from slime.utils.compiled import load_library

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def find(family: str, dtype: torch.dtype = torch.float32, experts: bool = False, **config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **config))
    args = EngineArgs(model_path="", enable_return_routed_experts=experts)
    return find_kernels(args, model.to(dtype))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_known_families_run_on_the_kernels(family: str):
    if load_library(SOURCE) is None:
        pytest.skip("no gcc here")
    assert isinstance(find(family), CpuKernels)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mistral", {}, "no fast forward for MistralForCausalLM"),
        ("qwen3", {"dtype": torch.bfloat16}, "compute in float32, not in torch.bfloat16"),
        ("qwen3_moe", {"experts": True}, "--enable-return-routed-experts"),
        ("llama", {"hidden_act": "gelu"}, "no activation 'gelu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "no RoPE of type 'dynamic'",
        ),
    ],
)
def test_other_models_run_on_their_hugging_face_modules(family: str, options: dict, reason: str):
    assert reason in find(family, **options)


def test_without_gcc_they_run_on_their_hugging_face_modules(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcc" in find("qwen3")


def test_a_config_without_end_token():
    """Qwen3-VL's text config has no such attribute unless config.json gives it."""
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    model.config = AutoConfig.for_model("qwen3_vl", text_config=text)
    model.generation_config = None
    assert eos_token_ids(model, None) == frozenset()
    assert eos_token_ids(model, 7) == {7}
