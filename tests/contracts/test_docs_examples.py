"""The examples of docs/customization.md fit the flags they stand under, and the main ones run."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_pool import EnginePool, install_pool
from slime.rollout.hooks import HOOKS, check_hooks
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Status
from tests.args import make_args
from tests.fake_engine import FakeEngine, Reply
from tests.prompts import flat, rollout_args

DOCUMENT = Path(__file__).parents[2] / "docs" / "customization.md"
MODULE = "docs_customization_examples"

# Which example goes with which flag.
EXAMPLES = {
    "reward": "custom_rm_path",
    "shortest_right_answer": "custom_rm_path",
    "with_calculator": "custom_generate_function_path",
    "not_too_easy": "dynamic_sampling_filter_path",
    "drop_truncated": "rollout_sample_filter_path",
    "count_prompts_never_solved": "rollout_all_samples_process_path",
    "longest_first": "buffer_filter_path",
    "Additions": "data_source_path",
    "one_after_the_other": "rollout_function_path",
    "centred": "custom_reward_post_process_path",
    "rows": "custom_convert_samples_to_train_data_path",
    "reward_on_the_last_token": "custom_advantage_function_path",
    "clip_advantages": "rollout_data_postprocess_path",
    "cross_entropy": "custom_loss_function_path",
    "truncated_ratio": "custom_tis_function_path",
    "sum_over_a_fixed_length": "custom_pg_loss_reducer_function_path",
    "log_longest": "custom_rollout_log_function_path",
    "print_rewards": "custom_eval_rollout_log_function_path",
}


@pytest.fixture(scope="module", autouse=True)
def module():
    made = types.ModuleType(MODULE)
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        exec(compile(block, str(DOCUMENT), "exec"), made.__dict__)
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


def test_every_flag_is_in_the_table_and_every_example_is_known(module):
    text = DOCUMENT.read_text()
    for name in HOOKS:
        assert f"`--{name.replace('_', '-')}`" in text
    defined = set(re.findall(r"^(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
    assert defined - {"fill"} == set(EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_have_the_right_signature(example):
    group_rm = example == "shortest_right_answer"
    check_hooks(
        make_args().replace(**{EXAMPLES[example]: f"{MODULE}.{example}"}, group_rm=group_rm)
    )


def rollout(tmp_path, script, source=None, **flags):
    paths = {name: f"{MODULE}.{value}" for name, value in flags.items() if name.endswith("_path")}
    rest = {name: value for name, value in flags.items() if not name.endswith("_path")}
    args = rollout_args(tmp_path, rollout_max_response_len=64, **rest, **paths)
    with FakeEngine(script) as engine:
        install_pool(EnginePool([engine.url]))
        output = generate_rollout(
            args, 0, source(args) if source else RolloutDataSourceWithBuffer(args)
        )
        install_pool(None)
    return output


def test_reward_filters_and_buffer(tmp_path, capsys):
    output = rollout(
        tmp_path,
        lambda request: Reply(text=f"it is {int(request.prompt[0]) + request.number % 2}"),
        rm_type=None,
        custom_rm_path="reward",
        dynamic_sampling_filter_path="not_too_easy",
        rollout_sample_filter_path="drop_truncated",
        rollout_all_samples_process_path="count_prompts_never_solved",
        buffer_filter_path="longest_first",
    )
    assert {s.reward for s in flat(output)} == {0.0, 1.0}
    assert "of 2 prompts unsolved; 10 prompts in all" in capsys.readouterr().out


def test_group_reward(tmp_path):
    output = rollout(
        tmp_path,
        lambda request: Reply(text="1234567890" + "!" * (request.number % 2)),
        rm_type=None,
        custom_rm_path="shortest_right_answer",
        group_rm=True,
        reward_key="score",
    )
    assert all(sorted(s.reward["score"] for s in group) == [0.0, 1.0] for group in output.samples)


def test_calculator(tmp_path):
    def script(request):
        asked = "=" in request.prompt.split("<calc>")[-1] and "<calc>" in request.prompt
        return Reply(text="so it is done" if asked else "<calc>20+22</calc>")

    output = rollout(tmp_path, script, custom_generate_function_path="with_calculator")
    for sample in flat(output):
        assert sample.status == Status.COMPLETED
        assert sample.response == "<calc>20+22</calc> = 42\nso it is done"
        assert 0 in sample.loss_mask and sample.loss_mask[-1] == 1


def test_data_source_of_the_example(tmp_path, module):
    output = rollout(tmp_path, lambda request: Reply(), source=module.Additions)
    assert [s.index for s in flat(output)] == [0, 1, 2, 3]
    args = rollout_args(tmp_path).replace(save=str(tmp_path), load=str(tmp_path))
    source = module.Additions(args)
    source.get_samples(3)
    source.save(0)
    resumed = module.Additions(args)
    resumed.load(0)
    assert resumed.get_samples(1) == source.get_samples(1)


def test_rollout_function_of_the_example(tmp_path, module):
    args = rollout_args(tmp_path)
    with FakeEngine() as engine:
        install_pool(EnginePool([engine.url]))
        output = module.one_after_the_other(args, 0, RolloutDataSourceWithBuffer(args))
        install_pool(None)
    assert {(s.response, s.status) for s in flat(output)} == {("ok", Status.COMPLETED)}
    assert all(s.reward in (0.0, 1.0) for s in flat(output))
