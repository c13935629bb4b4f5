"""What the rows of a dataset tell before any process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.ray.start_checks import check_inputs
from tests.args import make_args

MESSAGES = [{"role": "user", "content": "2+2?"}]
ASYNC = "slime.rollout.fully_async_rollout.generate_rollout"


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


@pytest.mark.parametrize(
    "overrides",
    [
        {"apply_chat_template": True},
        {"custom_generate_function_path": "tests.rollout_hooks.generate_two_turns"},
        {"rollout_function_path": "slime.rollout.sft_rollout.generate_rollout"},
    ],
    ids=["template", "generate function", "rollout function of another kind"],
)
def test_messages_are_taken_where_something_may_render_them(arguments, overrides):
    check_inputs(arguments(**overrides))
