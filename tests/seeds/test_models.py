"""The lists of supported models: the Megatron backend builds a plan for each, FSDP takes its config."""

from __future__ import annotations

import json

import pytest
from transformers import CONFIG_MAPPING

from tests.parity.model_facts import MODELS
from tests.seeds.documents import expect_failure, models
from tests.seeds.test_flags import on_base, resolved

# Name in the document -> published configs of it.
CONFIGS = {
    "LLaMA (1, 2, 3, 3.1)": ["llama2-7B", "llama3-8B", "llama3.1-8B"],
    "Qwen2": ["qwen2.5-0.5B"],  # one model type for both
    "Qwen2.5": ["qwen2.5-7B"],
    "Qwen3": ["qwen3-4B"],
    "GPT (GPT-OSS)": ["gpt-oss-20B"],
    "GLM4": ["glm4-9B"],
    "Qwen3-MoE": ["qwen3-30B-A3B"],
    "DeepSeekV3": ["deepseek-v3"],
    "GLM4-MoE": ["glm4.5-355B-A32B"],
    "MIMO": ["mimo-7B"],
    "Qwen3-VL": ["qwen3_vl"],
    "Qwen3-Next (Vision)": ["qwen3_next"],
    "Any HuggingFace AutoModel compatible model": ["llama3-8B", "qwen2.5-7B", "glm4-9B"],
    "Qwen3-MoE (with custom kernel support)": ["qwen3-30B-A3B"],
}


@pytest.mark.parametrize("name", models())
def test_backend_takes_the_model(name, tmp_path, request):
    expect_failure(request, "Models", name)
    backend = "fsdp" if "backends:146" in models()[name] else "megatron"
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    for model in CONFIGS[name]:
        config = MODELS[model]() if model in MODELS else CONFIG_MAPPING[model]()
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(config.to_dict()))
        argv = ["--train-backend", backend, "--hf-checkpoint", model]
        assert resolved(on_base(argv, tmp_path)).train_backend == backend
