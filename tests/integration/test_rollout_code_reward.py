"""The code reward; and rewards that block hold up no generation."""

from __future__ import annotations

import pytest

from slime.core.errors import UserError
from slime.core.types import Sample
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub import async_rm, code
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.http import run
from tests import rollout_hooks
from tests.args import make_args
from tests.fake_engine import Reply
from tests.odd_texts import ODD
from tests.prompts import flat, rollout_args

ADD = "Sure.\n```python\ndef add(a, b):\n    return a + b\n```"
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
ECHO = "```python\nn = int(input())\nprint(n * 2)\n```"


def grade(response, **fields):
    args = make_args(rm_type="code")
    return run(async_rm(args, Sample(response=response, **fields)))


@pytest.mark.parametrize(
    ("response", "tests", "reward"),
    [
        (ADD, ASSERTS, 1.0),
        (ADD.replace("+", "-"), ASSERTS, 0.0),
        ("```\ndef add(a, b): return 1\n```\n" + ADD, ASSERTS, 1.0),  # the last block
        ("<think>```python\nx\n```</think>" + ADD, ASSERTS, 1.0),
        ("def add(a, b): return a + b", ASSERTS, 1.0),
        ("```python\nimport sys\nsys.exit(0)\n```", ASSERTS, 0.0),  # leaving early proves nothing
        ("```python\nwhile True: pass\n```", ASSERTS, 0.0),
        (ECHO, [{"input": "4", "output": "8\n"}, {"input": "5", "output": "10"}], 1.0),
        (ECHO, [{"input": "4", "output": "8"}, {"input": "5", "output": "11"}], 0.0),
        ("", ASSERTS, 0.0),
    ],
)
def test_code_reward(response, tests, reward):
    assert grade(response, metadata={"tests": tests}) == reward


def test_tests_may_be_in_the_label_and_must_be_tests():
    assert grade(ECHO, label='[{"input": "1", "output": "2"}]') == 1.0
    assert grade(ADD, label="assert add(2, 2) == 4") == 1.0
    with pytest.raises(UserError, match="needs metadata"):
        grade(ADD, metadata={"tests": [{"in": 1}]})


def test_odd_programs_are_wrong_and_nothing_else():
    for text in ODD[:8]:
        assert (
            run(code.grade(Sample(response=text, metadata={"tests": ASSERTS}), isolate=True)) == 0.0
        )


def test_programs_and_tests_may_be_longer_than_an_argument_of_a_process():
    """128 KiB is all that Linux takes; a response of garbage must be wrong, not an error."""
    assert grade("汉" * 90_000, metadata={"tests": ASSERTS}) == 0.0
    padding = [f"assert add({i}, 1) == {i + 1}  # {'x' * 1000}" for i in range(200)]
    assert grade(ADD, metadata={"tests": padding}) == 1.0


def test_a_reward_that_blocks_its_event_loop_does_not_stall_generation(tmp_path, fake_engines):
    """One request at a time, and no reward comes back before the last one is made."""
    fake_engines(rollout_hooks.opening_at(3), concurrency=1)
    args = rollout_args(
        tmp_path, rollout_batch_size=2, n_samples_per_prompt=2,
        custom_rm_path="tests.rollout_hooks.reward_blocks_its_loop",
    )  # fmt: skip
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.reward for s in flat(output)] == [1.0] * 4  # generation waits for no reward
    assert rollout_hooks.seen == ["begins", "ends"] * 4  # they wait for each other


def test_a_reward_may_ask_the_engines(tmp_path, fake_engines):
    (engine,) = fake_engines(lambda request: Reply(text="7"))
    args = rollout_args(
        tmp_path, rollout_batch_size=2, n_samples_per_prompt=1,
        custom_rm_path="tests.rollout_hooks.reward_by_the_engine",
    )  # fmt: skip
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.reward for s in flat(output)] == [7.0, 7.0]
    assert len(engine.requests) == 4
