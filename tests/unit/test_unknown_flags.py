"""What is said about an option that does not exist: a former name, a typo, or nothing to suggest."""

import re

import pytest

from slime.config.flags.former_names import FORMER_NAMES
from slime.config.flags.parser import read_command_line, read_config
from slime.config.flags.registry import options
from slime.core.errors import ConfigError


def refusal(option: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_command_line([option])
    return str(error.value)


# Options of other versions of slime and Megatron whose counterpart is missing here: no similar name means
# the same, so none may be suggested.
WITHOUT_COUNTERPART = """
--allgather-cp --balance-by-flops --ci-load-grad-norm --custom-config-path --data-pad-size-multiplier
--disable-rollout-global-dataset --enable-experimental --enable-mtp-training --eval-min-new-tokens
--eval-tool-key --freeze-indexer --http-proxy --keep-old-actor --log-correct-samples --log-reward-category
--megatron-config-path --megatron-server-warmup --memory-snapshot-num-steps --multimodal-keys
--no-position-embedding --opd-teacher-ckpt-step --opsm-delta --padded-vocab-size --prefill-num-servers
--qwen-gdn-backend --ref-ckpt-step --release-train --reset-optimizer-states --rollout-buffer-url
--rollout-data-transport --rollout-sample-hook-path --rollout-task-type --sglang-config --sglang-router-ip
--sglang-router-port --spec --teacher-port --teacher-warmup-port --update-weight-delta-encoding
--update-weight-mode --use-distributed-post --use-gated-attention --use-opsm --use-rollout-entropy
"""


@pytest.mark.parametrize("option", WITHOUT_COUNTERPART.split())
def test_no_other_setting_is_suggested(option):
    assert option in options() or "did you mean" not in refusal(option)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--rollout-bach-size", "--rollout-batch-size"),
        ("--batch-rollout-size", "--rollout-batch-size"),
        ("--globalbatchsize", "--global-batch-size"),
        ("--rollout-max-repsonse-len", "--rollout-max-response-len"),
        ("--hf-chekpoint", "--hf-checkpoint"),
        ("--colocated", "--colocate"),
    ],
)
def test_typos_order_and_separators_are_recognised(typed, meant):
    assert f"did you mean {meant}?" in refusal(typed)


@pytest.mark.parametrize("option", FORMER_NAMES)
def test_former_names_say_what_to_type(option):
    assert option not in options(), "it is a flag: take it out of the table"
    advice = FORMER_NAMES[option]
    assert refusal(option) == f"there is no flag {option}: {advice}"
    for named in re.findall(r"--[a-z0-9-]+", advice):
        assert named in options(), f"the advice on {option} names {named}, which does not exist"


def test_a_config_file_says_the_same(tmp_path):
    for key in ("tensor_parallel_size", "tensor-parallel-size"):
        file = tmp_path / "run.yaml"
        file.write_text(f"{key}: 2\n")
        with pytest.raises(ConfigError) as error:
            read_config(str(file))
        expected = f"there is no flag {key}: {FORMER_NAMES['--tensor-parallel-size']}"
        assert str(error.value) == f"{file}: {expected}"
