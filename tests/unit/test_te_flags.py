"""Flags of TransformerEngine's kernels and of DeepEP, on machines with and without those packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.arguments import Args
from slime.core.errors import ConfigError
from tests.args import make_args

MODEL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_experts": 8,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
TE, DEEP_EP = "transformer_engine", "deep_ep"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make packages importable by name: flags are judged by what is installed, not by importing it."""

    def put(*packages: str) -> None:
        for package in packages:
            (tmp_path / "packages" / package).mkdir(parents=True, exist_ok=True)
            (tmp_path / "packages" / package / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    return put


@pytest.fixture
def megatron(tmp_path: Path):
    def make(**flags: Any) -> Args:
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        layout = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 1, "bf16": True}
        model = {"train_backend": "megatron", "hf_checkpoint": str(tmp_path)}
        return make_args(**model, **{**layout, **flags})

    return make


def refusal(make: Any, **flags: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make(**flags)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_attention_of_transformer_engine_needs_it(megatron, install, backend):
    option = f"--attention-backend {backend}"
    assert f"{option} is TransformerEngine's, which is not installed" in refusal(
        megatron, attention_backend=backend
    )
    install(TE)
    assert megatron(attention_backend=backend).attention_backend == backend
    said = refusal(megatron, attention_backend=backend, transformer_impl="local")
    assert option in said and "--transformer-impl transformer_engine" in said
    said = refusal(megatron, attention_backend=backend, context_parallel_size=2)
    assert option in said and "--context-parallel-size 2" in said


def test_cudnn_attention_is_refused_in_fp32(megatron, install):
    install(TE)
    flags = {"bf16": None, "fp32": True, "transformer_impl": TE}
    assert "--fp32" in refusal(megatron, attention_backend="fused", **flags)
    assert megatron(attention_backend="unfused", **flags).attention_backend == "unfused"


@pytest.mark.parametrize("backend", ["auto", "flash", "local"])
@pytest.mark.parametrize("packages", [(), (TE,)])
def test_packed_attention_serves_every_machine(megatron, install, backend, packages):
    install(*packages)
    assert not about(megatron(attention_backend=backend, context_parallel_size=2), "attention")


@pytest.mark.parametrize("value", [0, 1])
def test_a_setting_of_fp8_without_fp8_is_refused(megatron, install, value):
    install(TE)
    said = refusal(megatron, fp8_margin=value)
    assert "--fp8-margin has no effect without FP8: add --fp8-format hybrid" in said


def test_the_name_of_a_model_does_not_choose_its_type(megatron):
    (said,) = about(megatron(model_name="deepseek_v3"), "--model-name")
    assert "deepseek_v3 only names the run's folder" in said and "type qwen3_moe" in said
    assert not about(megatron(model_name="Qwen3-MoE-30B"), "--model-name")


def test_fused_gradient_accumulation_needs_its_kernel(megatron, install):
    flags = {"gradient_accumulation_fusion": True}
    assert "--gradient-accumulation-fusion needs a kernel of Apex" in refusal(megatron, **flags)
    install("fused_weight_gradient_mlp_cuda")
    assert megatron(**flags).gradient_accumulation_fusion


@pytest.mark.parametrize("name", ["moe_permute_fusion", "moe_router_fusion"])
def test_a_fusion_without_transformer_engine_is_a_warning(megatron, install, name):
    option = "--" + name.replace("_", "-")
    (said,) = about(megatron(**{name: True}), option)
    assert "no effect without TransformerEngine" in said
    install(TE)
    assert not about(megatron(**{name: True}), option)


def test_megatrons_loss_is_never_computed(megatron, install):
    install(TE)
    args = megatron(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    said = about(args, "--cross-entropy")
    assert len(said) == 2 and all("has no effect: log-probs" in line for line in said)
    assert not about(megatron(cross_entropy_loss_fusion=False), "--cross-entropy")


@pytest.mark.parametrize("replay", ["use_routing_replay", "use_rollout_routing_replay"])
def test_a_fused_router_cannot_replay(megatron, install, replay):
    install(TE)
    said = refusal(megatron, moe_router_fusion=True, **{replay: True})
    assert "--moe-router-fusion" in said and "--" + replay.replace("_", "-") in said


@pytest.mark.parametrize(
    "again",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"moe_layer_recompute": True},
    ],
)
def test_experts_computed_again_in_a_pipeline_cannot_replay(megatron, again):
    flags = {"use_routing_replay": True, **again}
    assert megatron(**flags).use_routing_replay
    said = refusal(megatron, pipeline_model_parallel_size=2, **flags)
    assert "--use-routing-replay" in said and "--pipeline-model-parallel-size 2" in said


def test_userbuffers_are_refused_with_transformer_engine_too(megatron, install):
    install(TE)
    said = refusal(megatron, tp_comm_overlap=True)
    assert "--tp-comm-overlap" in said and "differ in length" in said


def test_norms_inside_linear_layers_are_not_computed_again(megatron, install):
    flags = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    assert not about(megatron(**flags), "--recompute-modules")
    install(TE)
    assert "norms before experts only" in about(megatron(**flags), "--recompute-modules")[0]
    assert not about(megatron(transformer_impl="local", **flags), "--recompute-modules")


FLEX = {"moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 8}


@pytest.mark.parametrize("flags", [{"moe_enable_deepep": True}, {}])
def test_flex_needs_deepep(megatron, install, flags):
    said = refusal(megatron, **FLEX, **flags)
    assert "needs the package deep_ep" in said and "alltoall" in said
    install(DEEP_EP)
    assert megatron(**FLEX, **flags).moe_token_dispatcher_type == "flex"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"expert_model_parallel_size": 1}, ["expert-parallel ranks, and there is one"]),
        ({"moe_router_dtype": "fp64"}, ["probabilities in fp32", "--moe-router-dtype fp64"]),
        ({"moe_shared_expert_overlap": True}, ["--moe-shared-expert-overlap"]),
        (
            {"moe_enable_deepep": True, "moe_flex_dispatcher_backend": "hybridep"},
            ["--moe-enable-deepep", "--moe-flex-dispatcher-backend hybridep"],
        ),
    ],
)
def test_what_flex_cannot_do(megatron, install, flags, words):
    install(DEEP_EP)
    said = refusal(megatron, **{**FLEX, **flags})
    assert all(word in said for word in words), said


def about(args: Args, word: str) -> list[str]:
    return [warning for warning in args.warnings if word in warning]
