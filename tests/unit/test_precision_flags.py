"""Flags of FP8 and of the optimizer's precision: honoured where the card and the packages can, else refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.arguments import Args
from slime.config.checks.precision_checks import fp8_refusal
from slime.core.errors import ConfigError
from tests.args import make_args

MODEL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
DTYPES = ["main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"]
AWARE = {"use_precision_aware_optimizer": True}
OFFLOAD = {**AWARE, "optimizer_cpu_offload": True}


@pytest.fixture
def te(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine as the flags see it: a package that can be found, and is not imported."""
    (tmp_path / "packages" / "transformer_engine").mkdir(parents=True)
    (tmp_path / "packages" / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))


@pytest.fixture
def megatron(tmp_path: Path):
    def make(**flags: Any) -> Args:
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        layout = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 1}
        layout |= {} if flags.get("fp32") else {"bf16": True}
        model = {"train_backend": "megatron", "hf_checkpoint": str(tmp_path)}
        return make_args(**model, **{**layout, **flags})

    return make


def refusal(make: Any, **flags: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make(**flags)
    assert "\n" not in str(error.value)
    return str(error.value)


def half(name: str) -> str:
    return "fp16" if name == "main_params_dtype" else "bf16"


@pytest.mark.parametrize("name", DTYPES)
def test_types_of_the_optimizers_tensors(megatron, te, name):
    option, value = "--" + name.replace("_", "-"), half(name)
    assert f"{option} {value} needs --use-precision-aware-optimizer" in refusal(
        megatron, **{name: value}
    )
    assert getattr(megatron(**AWARE, **{name: value}), name) == value
    assert getattr(megatron(**{name: "fp32"}), name) == "fp32"
    if name == "main_grads_dtype":  # their buffers are on the GPU either way
        assert megatron(**OFFLOAD, **{name: value}).main_grads_dtype == value
    else:
        assert "--optimizer-cpu-offload" in refusal(megatron, **OFFLOAD, **{name: value})


def test_moments_in_fp8_are_refused(megatron, te):
    assert "NaN: use bf16" in refusal(megatron, **AWARE, exp_avg_dtype="fp8")


def test_gradients_are_reduced_in_one_precision(megatron, te):
    flags = {**AWARE, "main_grads_dtype": "bf16", "accumulate_allreduce_grads_in_fp32": True}
    assert "mutually exclusive" in refusal(megatron, **flags)


def test_fused_adam_is_for_bf16_and_needs_transformer_engine(megatron, te, monkeypatch):
    assert "--bf16" in refusal(megatron, **AWARE, fp32=True)
    assert megatron(**AWARE, transformer_impl="local").use_precision_aware_optimizer
    monkeypatch.undo()
    assert "TransformerEngine's FusedAdam" in refusal(megatron, **AWARE)
    assert megatron(**OFFLOAD).use_precision_aware_optimizer


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"fp8_recipe": "blockwise"}, "--fp8-recipe has no effect without FP8"),
        ({"fp8_amax_history_len": 16}, "add --fp8-format hybrid"),
        ({"fp8_format": "hybrid", "fp8_recipe": "custom"}, "use delayed, tensorwise, blockwise"),
        ({"fp8_format": "hybrid", "fp8_param_gather": True}, "saved and offloaded as bf16"),
        ({"fp8_format": "hybrid", "fp8_dot_product_attention": True}, "attention is computed in"),
        ({"fp8_format": "hybrid", "fp8_interval": 2}, "ignores it"),
        ({"fp4_format": "e2m1"}, "padded for the FP8 recipes"),
        (
            {"fp8_format": "hybrid", "fp8_recipe": "mxfp8", "expert_tensor_parallel_size": 1}
            | {"tensor_model_parallel_size": 8, "sequence_parallel": True}
            | {"expert_model_parallel_size": 8},
            "intermediate_size 128 of the model over --tensor-model-parallel-size 8 is not a multiple "
            "of 32",
        ),
    ],
)
def test_fp8_that_is_refused(megatron, te, flags, words):
    assert words in refusal(megatron, **flags)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fp8_that_is_honoured(megatron, te, recipe):
    args = megatron(fp8_format="hybrid", fp8_recipe=recipe, fp8_amax_history_len=16)
    told = [warning for warning in args.warnings if "--fp8-amax-history-len" in warning]
    assert bool(told) == (recipe != "delayed")


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "words"),
    [
        ("tensorwise", (8, 0), "13.0", "8.9 or higher, this one has compute capability 8.0"),
        ("delayed", (8, 9), "12.4", None),
        ("blockwise", (8, 9), "13.0", "blockwise needs a GPU of compute capability 9.0"),
        ("blockwise", (9, 0), "12.8", "CUDA 12.9 or newer, torch was built for 12.8"),
        ("blockwise", (9, 0), "12.9", None),
        ("blockwise", (9, 0), "13.0", None),
        ("mxfp8", (9, 0), "13.0", "mxfp8 needs a GPU of compute capability 10.x"),
        ("mxfp8", (10, 0), "13.0", None),
        ("mxfp8", (12, 0), "13.0", "mxfp8 needs a GPU"),
        ("tensorwise", None, None, None),
    ],
)
def test_which_card_computes_which_recipe(recipe, capability, cuda, words):
    said = fp8_refusal(recipe, capability, cuda)
    assert said is None if words is None else words in said
