"""Freezing by pattern: the names of a parameter, patterns that match nothing, parts of fused parameters."""

import pytest
from transformers import AutoConfig, Qwen2Config

from slime.backends.megatron_utils.hf_weights.families import padded_weight_map
from slime.backends.megatron_utils.model_config import MimoConfig
from slime.backends.param_names import Freezing, check_freezing, names_of
from slime.config.checks.model_types import TRAINED
from slime.core.errors import ConfigError
from slime.ray.start_checks import check_inputs
from tests.args import make_args
from tests.tiny import make_tiny_checkpoint

LAYER = "model.layers.{}."
DENSE = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
DENSE += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm"]
TIED = ["model.embed_tokens.weight", "model.norm.weight"]
TIED += [f"{LAYER.format(n)}{name}.weight" for n in range(2) for name in DENSE]
UNTIED = [*TIED, "lm_head.weight"]


def freezing(*frozen: str, only: tuple[str, ...] | None = None) -> Freezing:
    return Freezing(only=only, frozen=frozen)


def fixed(names: list[str], *frozen: str) -> set[str]:
    return set(names) - set(freezing(*frozen).trained(names))


@pytest.mark.parametrize("model_type", TRAINED)
def test_the_names_are_those_of_megatrons_parameters(model_type):
    """Every parameter of every family is found under the name that Megatron's own model gives it."""
    config = (
        MimoConfig(attention_bias=True)
        if model_type == "mimo"
        else AutoConfig.for_model(model_type)
    )
    config.tie_word_embeddings = getattr(
        config, "tie_word_embeddings", False
    )  # Qwen3-VL's is outside
    weights = padded_weight_map(config, config.vocab_size)
    stacked = model_type == "gpt_oss"  # one tensor of the checkpoint is many parameters in Megatron
    for rule in weights.rules:
        if stacked and rule.per_expert:
            continue
        for hf_name in rule.hf_names(layer=3, expert=5):
            assert rule.name(layer=3, expert=5) in names_of(hf_name, tied=weights.is_tied), hf_name


def test_tied_weights_are_recognised():
    for tied in (True, False):
        config = Qwen2Config(tie_word_embeddings=tied)
        assert padded_weight_map(config, config.vocab_size).is_tied is tied


def test_both_kinds_of_names_freeze_the_same():
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert fixed(UNTIED, "embedding", "output_layer") == ends
    assert fixed(UNTIED, "embed_tokens", "lm_head") == ends
    in_hf = fixed(UNTIED, r"layers\.1\.self_attn\.[qkv]_proj")
    assert fixed(UNTIED, r"layers\.1\.self_attention\.linear_qkv") == in_hf
    assert in_hf == {f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"}


def test_the_output_layer_of_a_tied_model_is_its_embedding():
    assert fixed(TIED, "embedding", "output_layer") == {"model.embed_tokens.weight"}
    assert fixed(TIED, "output_layer") == {"model.embed_tokens.weight"}


def test_experts_have_the_names_of_grouped_layers_too():
    name = "model.layers.4.mlp.experts.7.up_proj.weight"
    assert "decoder.layers.4.mlp.experts.linear_fc1.weight7" in names_of(name)
    assert fixed([name, *UNTIED], r"mlp\.experts\.linear_fc1") == {name}
    stacked = "model.layers.4.mlp.experts.gate_up_proj"  # how transformers builds them
    assert fixed([stacked, *UNTIED], r"mlp\.experts\.linear_fc1") == {stacked}


def test_only_train_takes_both_kinds_of_names():
    only = freezing(only=("linear_fc2", "lm_head"))
    expected = {f"model.layers.{n}.mlp.down_proj.weight" for n in range(2)} | {"lm_head.weight"}
    assert set(only.trained(UNTIED)) == expected


@pytest.mark.parametrize("flag", ["freeze_params_name_list", "only_train_params_name_list"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_pattern_that_matches_nothing_is_an_error(flag, backend):
    args = make_args(train_backend=backend, **{flag: ["embedding", "linear_qvk"]})
    with pytest.raises(ConfigError) as error:
        check_freezing(args, UNTIED)
    option = "--" + flag.replace("_", "-")
    assert f"{option} linear_qvk matches no parameter" in str(error.value)
    assert "model.embed_tokens.weight (or embedding.word_embeddings.weight)" in str(error.value)


def test_everything_frozen_is_an_error():
    with pytest.raises(ConfigError, match="leave no parameter to train"):
        freezing(".").trained(UNTIED)


def test_a_part_of_a_fused_parameter_cannot_be_frozen_in_megatron():
    flags = {"freeze_params_name_list": ["q_proj"]}
    check_freezing(make_args(train_backend="fsdp", **flags), UNTIED)
    with pytest.raises(ConfigError) as error:
        check_freezing(make_args(train_backend="megatron", **flags), UNTIED)
    assert "which are one parameter with --train-backend megatron" in str(error.value)
    assert "(decoder.layers.0.self_attention.linear_qkv.weight)" in str(error.value)


EXPERTS = [
    "model.layers.0.mlp.down_proj.weight",
    *(
        f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(2)
        for part in ("gate", "up", "down")
    ),
    "lm_head.weight",
]
STACKED = [
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.experts.down_proj",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        (r"down_proj\.weight$", [0, 2]),
        (r"experts\.gate_up_proj", [1]),
        (r"experts\.\d+\.", [1, 2]),
    ],
)
def test_patterns_of_a_checkpoint_freeze_the_stacked_experts_of_fsdp(pattern, frozen):
    args = make_args(train_backend="fsdp", freeze_params_name_list=[pattern])
    check_freezing(args, EXPERTS)
    trained = Freezing.of(args).trained(STACKED)
    assert trained == [name for i, name in enumerate(STACKED) if i not in frozen]


@pytest.mark.parametrize("pattern", [r"experts\.1\.", r"experts\.\d+\.gate_proj"])
def test_one_expert_of_a_stack_cannot_be_frozen_in_fsdp(pattern):
    args = make_args(train_backend="fsdp", freeze_params_name_list=[pattern])
    with pytest.raises(ConfigError, match="one parameter with --train-backend fsdp"):
        check_freezing(args, EXPERTS)


def test_a_start_checks_the_patterns_against_the_checkpoint(tmp_path):
    tiny_model = make_tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="--freeze-params-name-list vision matches no parameter"):
        check_inputs(make_args(hf_checkpoint=tiny_model, freeze_params_name_list=["vision"]))


def test_a_pattern_must_be_a_regular_expression():
    with pytest.raises(ConfigError, match=r"--freeze-params-name-list \* is not a regular"):
        make_args(freeze_params_name_list=["*"])
