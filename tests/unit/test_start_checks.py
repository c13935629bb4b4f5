"""What the rows of a dataset tell before any process starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.ray.start_checks import _check_data, check_inputs, refuse_other_tower
from tests.args import make_args
from tests.tiny_vision import make_vision_checkpoint

MESSAGES = [{"role": "user", "content": "2+2?"}]
ASYNC = "slime.rollout.fully_async_rollout.generate_rollout"
SFT = "slime.rollout.sft_rollout.generate_rollout"


@pytest.fixture
def arguments(tmp_path: Path):
    """A model folder as far as files are looked at, and rows whose second one is a list of messages."""
    config = Path(make_args().hf_checkpoint) / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    rows = [{"input": "1+1?"}, {"input": MESSAGES}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps(rows[0]) + "\n")

    def make(*, messages_in: str = "prompt_data", **overrides: Any):
        values: dict[str, Any] = {"prompt_data": [str(text)], "hf_checkpoint": str(tmp_path)}
        if messages_in == "prompt_data":
            values["prompt_data"] = [str(data)]
        else:
            values |= {"eval_prompt_data": ["held", str(data)], "eval_interval": 1}
        return make_args(**values, **overrides)

    return make


@pytest.mark.parametrize("messages_in", ["prompt_data", "eval_prompt_data"])
@pytest.mark.parametrize("function", [None, ASYNC])
def test_messages_that_nothing_renders_are_refused(arguments, messages_in, function):
    args = arguments(messages_in=messages_in, rollout_function_path=function)
    with pytest.raises(ConfigError) as caught:
        check_inputs(args)
    said = str(caught.value)
    assert "rows.jsonl:2: " in said and "list of messages" in said
    assert said.endswith("add --apply-chat-template")


def own_rollout(args, rollout_id, data_source, evaluation=False):
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        {"apply_chat_template": True},
        {"custom_generate_function_path": "tests.rollout_hooks.generate_two_turns"},
        {"rollout_function_path": "tests.unit.test_start_checks.own_rollout"},
    ],
    ids=["template", "generate function", "rollout function of another kind"],
)
def test_messages_are_taken_where_something_may_render_them(arguments, overrides):
    check_inputs(arguments(**overrides))


ANSWERED = [*MESSAGES, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        ([{"input": ANSWERED}], {}, None),
        ([{"input": "2+2?", "label": "4"}], {"label_key": "label"}, None),
        ([{"input": ANSWERED}, {"input": MESSAGES}], {}, "sft.jsonl:2: 'input' has no assistant"),
        ([{"input": ANSWERED}], {"apply_chat_template": True}, "sft.jsonl:1: a row for SFT needs"),
        ([{"input": "2+2?", "label": 4}], {"label_key": "label"}, "sft.jsonl:1: a row for SFT"),
    ],
)
def test_rows_without_a_response_are_refused_for_supervised_training(
    arguments, tmp_path, rows, flags, said
):
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"rollout_function_path": SFT, "loss_type": "sft_loss", "rm_type": None, **flags}
    args = arguments(**values).replace(prompt_data=[str(data)])
    if said is None:
        check_inputs(args)
        return
    with pytest.raises(ConfigError) as caught:
        check_inputs(args)
    assert said in str(caught.value)


def test_more_prompts_than_rows_are_mentioned(arguments):
    """A file of 2 rows, of which the second needs the template."""
    for batch, repeated in ((2, False), (3, True)):
        args = arguments(
            apply_chat_template=True, rollout_batch_size=batch, global_batch_size=batch
        )
        lines = _check_data(args)
        assert lines[0].startswith("2 rows of ")
        said = f"--rollout-batch-size {batch}: prompts repeat in a rollout"
        assert lines[1:] == ([said] if repeated else [])


def test_a_frozen_tower_is_that_of_the_checkpoint(tmp_path):
    """Megatron's trainer and engines take it from --hf-checkpoint, and a run may start from other weights."""
    model, other = (make_vision_checkpoint(tmp_path / str(n), seed=n) for n in range(2))
    same = shutil.copytree(model, tmp_path / "same")
    keys = {"multimodal_keys": {"image": "images"}, "train_backend": "megatron"}

    def run(**flags: Any):
        return make_args(hf_checkpoint=str(model), **keys, **flags)

    refuse_other_tower(run(ref_load=str(same)))
    refuse_other_tower(run(ref_load=str(other), freeze_vision_tower=False))
    with pytest.raises(ConfigError, match="has another vision tower than --hf-checkpoint"):
        refuse_other_tower(run(ref_load=str(other)))
