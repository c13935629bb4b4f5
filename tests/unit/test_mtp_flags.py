"""Flags of multi-token-prediction (MTP) layers: what is derived, carried over, sent and refused."""

import json

import pytest

from slime.config.arguments import parse_args
from slime.core.errors import ConfigError
from tests.args import make_args, make_argv

GLM = {  # four layers of GLM-4.5
    "model_type": "glm4_moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "n_routed_experts": 4,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture
def run(tmp_path):
    """Return the arguments of a Megatron run with these flags; `config` changes config.json."""

    def build(config=None, without=None, **flags):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        content = GLM | (config or {})
        content.pop(without, None)
        (folder / "config.json").write_text(json.dumps(content))
        common = {"train_backend": "megatron", "hf_checkpoint": str(folder)}
        return make_args(**{**common, "actor_num_gpus_per_node": 2, **flags})

    return build


TRAINED = {"mtp_num_layers": 1, "enable_mtp_training": True}


def test_the_factor_is_that_of_slimes_users_unless_given(run):
    assert run(**TRAINED).mtp_loss_scaling_factor == 0.2
    assert run(**TRAINED, mtp_loss_scaling_factor=0.1).mtp_loss_scaling_factor == 0.1


def test_the_number_alone_is_compared_with_the_model_and_carries_layers_over(run):
    from slime.backends.megatron_utils.model_config import trained_mtp_layers

    args = run(mtp_num_layers=1)
    assert trained_mtp_layers(args) == 0
    assert any("--enable-mtp-training" in warning for warning in args.warnings)
    assert trained_mtp_layers(run(**TRAINED)) == 1
    assert run(**TRAINED).warnings == ()


def test_mimo_has_one_layer_also_where_its_config_does_not_say_so(run):
    mimo = {"model_type": "mimo", "num_nextn_predict_layers": None}
    with pytest.raises(ConfigError, match="has 0 MTP layers"):
        run(mimo, **TRAINED)
    assert run({**mimo, "num_nextn_predict_layers": 2}, **TRAINED).mtp_num_layers == 1
    unsaid = {"model_type": "mimo"}
    assert run(unsaid, without="num_nextn_predict_layers", **TRAINED).mtp_num_layers == 1
    with pytest.raises(ConfigError, match="has 1 MTP layers"):
        run(unsaid, without="num_nextn_predict_layers", mtp_num_layers=2)


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        ({"num_nextn_predict_layers": 0}, {}, "has 0 MTP layers"),
        ({}, {"mtp_num_layers": 2}, "has 1 MTP layers"),
        ({}, {"mtp_num_layers": -1}, "has 1 MTP layers"),
        ({"model_type": "qwen3_moe"}, {}, "has 0 MTP layers"),
        ({"tie_word_embeddings": True}, {"pipeline_model_parallel_size": 2}, "tied embedding"),
        (
            {},
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|ttL"},
            "--pipeline-model-parallel-layout",
        ),
        ({}, {"custom_model_provider_path": "x.y"}, "--custom-model-provider-path"),
        ({}, {"mtp_num_layers": None}, "needs --mtp-num-layers"),
        ({}, {"enable_mtp_training": None, "mtp_loss_scaling_factor": 0.1}, "add that"),
    ],
)
def test_what_cannot_work_is_refused(run, config, flags, said):
    with pytest.raises(ConfigError, match=said):
        run(config, **{**TRAINED, **flags})


def test_fsdp_refuses_it():
    with pytest.raises(
        ConfigError, match="--enable-mtp-training belongs to --train-backend megatron"
    ):
        parse_args([*make_argv(train_backend="fsdp"), "--enable-mtp-training"])


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        ({"sglang_speculative_algorithm": "EAGLE"}, True),
        ({"sglang_speculative_algorithm": "NEXTN"}, True),
        ({"sglang_speculative_algorithm": "NGRAM"}, False),
        ({}, False),
        (
            {"sglang_speculative_algorithm": "EAGLE", "sglang_speculative_draft_model_path": "d"},
            False,
        ),
    ],
)
def test_engines_that_draft_with_mtp_layers_are_sent_them(run, flags, sent):
    pytest.importorskip("megatron.core")
    from slime.backends.megatron_utils.hf_weights.export import serves_mtp

    args = run(**TRAINED).replace(rollout_engine="sglang", **flags)
    assert serves_mtp(args) is sent
    assert not serves_mtp(args.replace(rollout_engine="slime"))
