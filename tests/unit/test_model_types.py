"""What is said about models that a trainer does not take: true advice, and what a checkpoint holds."""

import json

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from slime.backends.fsdp_utils.model import refuse_unpackable
from slime.config.checks.model_types import TRAINED, check_model_type
from slime.core.errors import ConfigError
from slime.data.tokenizer import load_hf_config
from tests.args import make_args

FAMILIES = ["glm_moe_dsa", "deepseek_v32"]
FAMILIES += ["minimax_m2"]
FAMILIES += ["gemma2", "mamba", "kimi_linear"]


def refusal(call, *given, **named) -> str:
    with pytest.raises(ConfigError) as error:
        call(*given, **named)
    return str(error.value)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_other_trainer_is_only_advised_where_it_takes_the_model(model_type):
    said = refusal(check_model_type, model_type)
    assert f"--train-backend megatron does not train models of type {model_type}" in said
    advised = said.partition("Use ")[2]
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in (
        MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        assert not advised and "--train-backend fsdp does not train" in said
        return
    assert (
        advised == f"--train-backend fsdp{' --qkv-format bshd' if is_refused(model_type) else ''}"
    )


def is_refused(model_type: str) -> bool:
    """Whether the FSDP trainer refuses packed samples of a model of this type, built without weights."""
    import torch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](num_hidden_layers=4))
    try:
        refuse_unpackable(model)
    except ConfigError as error:
        assert "--qkv-format bshd" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "glm_moe_dsa"}, "its sparse attention, in which an indexer chooses"),
        ({"model_type": "deepseek_v32"}, "its sparse attention, in which an indexer chooses"),
    ],
)
def test_families_have_their_own_sentence(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refusal(make_args, hf_checkpoint=str(tmp_path), train_backend="megatron")
    assert words in said
    assert ", ".join(TRAINED[:2]) not in said, "the list of what is trained does not help here"


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_gated_delta_nets_are_trained_on_packed_samples(tmp_path, model_type, qkv_format, backend):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    flags = {"hf_checkpoint": str(tmp_path), "train_backend": backend, "qkv_format": qkv_format}
    assert make_args(**flags).qkv_format == qkv_format
    said = refusal(make_args, **flags, sglang_speculative_algorithm="ngram")
    assert said.startswith("--sglang-speculative-algorithm ngram: ")
    assert model_type in said and "recurrent layers" in said and said.endswith(": remove it")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"linear_chunk_decay": 2}, "the option linear_chunk_decay of linear attention"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"attn_output_gate": False}, "attn_output_gate false"),
        ({"linear_num_key_heads": 6, "linear_num_value_heads": 8}, "6 does not divide"),
    ],
)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_options_of_linear_attention_that_slime_does_not_have_are_refused(
    tmp_path, option, words, backend
):
    text = {"model_type": "qwen3_5_text", "attn_output_gate": True, "hidden_act": "silu", **option}
    config = {"model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = refusal(make_args, hf_checkpoint=str(tmp_path), train_backend=backend)
    assert said.startswith("config.json of --hf-checkpoint has ") and words in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"tensor_model_parallel_size": 8},
            "--tensor-model-parallel-size 8 x --context-parallel-size 1 = 8 does not divide the 4 key heads",
        ),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 4},
            "--tensor-model-parallel-size 2 x --context-parallel-size 4 = 8 does not divide the 4 key heads",
        ),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1: the MTP layers of qwen3_5_text (mtp.* in "),
    ],
)
def test_what_megatron_cannot_do_with_gated_delta_nets_is_refused(tmp_path, flags, words):
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_attention_heads": 8}
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = str(tmp_path / "{rollout_id}.pt")
    base = {"train_backend": "megatron", "load_debug_rollout_data": rows}
    base |= {"actor_num_gpus_per_node": 8, "hf_checkpoint": str(tmp_path)}
    fitting = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    make_args(**base, **fitting)
    said = refusal(make_args, **base, **flags)
    assert words in said and "\n" not in said


@pytest.mark.parametrize("model_type", ["glm_moe_dsa"])
def test_packed_samples_that_would_be_mixed_are_refused_before_a_start(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    said = refusal(make_args, hf_checkpoint=str(tmp_path), train_backend="fsdp")
    assert said.endswith("add --qkv-format bshd")
    make_args(hf_checkpoint=str(tmp_path), train_backend="fsdp", qkv_format="bshd")


def test_kimi_k2_is_read_as_deepseek_v3_and_its_python_code_is_not_run(tmp_path):
    code = "raise SystemExit('code of the checkpoint was run')"
    (tmp_path / "configuration_deepseek.py").write_text(code)
    given = {
        "model_type": "kimi_k2",
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "configuration_deepseek.DeepseekV3ForCausalLM",
        },
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 2,
        "n_routed_experts": 384,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "mscale_all_dim": 1.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(given))
    for backend in ("fsdp", "megatron"):
        make_args(hf_checkpoint=str(tmp_path), train_backend=backend)
    config = load_hf_config(tmp_path)
    assert type(config) is DeepseekV3Config and config.model_type == "deepseek_v3"
    assert config.n_routed_experts == 384 and config.rope_parameters["beta_fast"] == 1.0
    assert type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map")


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
FP8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": INT4}},
}


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        (PACKED, "INT4 weights (compressed-tensors, pack-quantized)"),
        ({"quant_method": "gptq", "bits": 8}, "INT8 weights (gptq)"),
        ({"quant_method": "awq", "bits": 4}, "INT4 weights (awq)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "INT4 weights (bitsandbytes)"),
        ({"quant_method": "quark"}, "quantized weights (quark)"),
    ],
)
@pytest.mark.parametrize("engine", ["slime", "sglang"])
def test_integer_weights_are_named_for_what_they_are(tmp_path, declared, named, engine):
    flags = {"hf_checkpoint": str(tmp_path), "rollout_engine": engine, "dry_run": True}
    for config in (
        {"model_type": "qwen3", "quantization_config": declared},
        {"quantization_config": declared, "text_config": {"model_type": "qwen3"}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        said = refusal(make_args, **flags)
        assert f"{tmp_path} holds {named}, which slime does not train" in said
        assert "bf16" in said and "per channel" not in said
    assert make_args(**flags, debug_rollout_only=True).debug_rollout_only


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": FP8}}},
    ],
)
def test_weights_that_are_read_are_not_refused(tmp_path, declared):
    config = {"model_type": "qwen3", "quantization_config": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert make_args(hf_checkpoint=str(tmp_path), dry_run=True).hf_checkpoint == str(tmp_path)
