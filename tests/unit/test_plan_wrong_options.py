"""What `slime plan` itself is told wrongly: one sentence each, before any model is built."""

import json

import pytest

from slime.cli.plan.model_shape import read_shape
from slime.cli.plan.request import PlanOptions, split_options
from slime.cli.plan.suggest import cluster_flags, suggest
from slime.core.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "2.5"], "--gpus must be a whole number, not 2.5"),
        (["--gpus", "inf"], "--gpus must be a number above 0, not inf"),
        (["--gpus", "0"], "--gpus must be a number above 0, not 0"),
        (["--gpus"], "--gpus: '' is not a number"),
        (["--gpu-memory", "nan"], "--gpu-memory must be a number above 0, not nan"),
        (["--gpu-memory=80GB"], "--gpu-memory: '80GB' is not a number"),
        (["--host-memory", "-1"], "--host-memory must be a number above 0, not -1"),
        (["--html"], "--html needs the name of the file"),
        (["--html", "--json"], "--html needs the name of the file"),
        (["--html", "/no/such/folder/plan.html"], "/no/such/folder does not exist"),
    ],
)
def test_options(words, sentence):
    with pytest.raises(ConfigError) as refused:
        split_options(words)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("gpus", "words", "sentence"),
    [
        (12, [], "12 is not a multiple of the 8 GPUs of a machine: add --num-gpus-per-node 6 or"),
        (13, [], "13 is not a multiple of the 8 GPUs of a machine: give another number of GPUs"),
        (12, ["--num-gpus-per-node", "5"], "12 is not a multiple of the 5 GPUs of a machine"),
        (None, [], "--suggest needs the number of GPUs"),
        (8, [], "the plan needs the model's shape"),
    ],
)
def test_suggest(gpus, words, sentence):
    with pytest.raises(ConfigError) as refused:
        suggest(words, PlanOptions(gpus=gpus, suggest=True))
    assert sentence in str(refused.value)


def test_a_config_that_is_no_language_models(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
    with pytest.raises(ConfigError, match="has no num_attention_heads"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "tokens"), [([], "8192"), (["--max-tokens-per-gpu", "512"], "512")]
)
def test_suggestions_keep_the_token_budget_that_was_given(words, tokens):
    flags = cluster_flags(16, words)
    assert flags[flags.index("--max-tokens-per-gpu") + 1] == tokens
