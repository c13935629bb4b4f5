"""Good and minimal hooks of the rollout side, called by slime itself against a scripted engine."""

from __future__ import annotations

import pytest

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.rollout.base_types import (
    RolloutFnTrainOutput,
    RolloutFunction,
    as_eval_output,
    as_train_output,
)
from slime.rollout.context import RolloutContext
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_pool import EnginePool
from slime.rollout.hooks import check_hooks
from slime.rollout.metrics import eval_metrics
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.load_function import load_function
from tests.contracts import good, minimal
from tests.fake_engine import FakeEngine
from tests.prompts import flat, rollout_args

BOTH = pytest.mark.parametrize("module", [good, minimal], ids=["good", "minimal"])


@pytest.fixture(scope="module")
def engine():
    with FakeEngine() as started, RolloutContext(pool=EnginePool([started.url])).active():
        yield started


def rollout(tmp_path, source=None, **overrides):
    args = rollout_args(tmp_path, **overrides)
    check_hooks(args)
    return generate_rollout(args, 0, source or RolloutDataSourceWithBuffer(args))


@BOTH
def test_rollout_and_eval_functions(tmp_path, module):
    path = f"{module.__name__}.rollout_function_path"
    args = rollout_args(tmp_path, rollout_function_path=path)
    fn = load_function(path, flag="--rollout-function-path", protocol=RolloutFunction)
    source = RolloutDataSourceWithBuffer(args)
    output = as_train_output(fn(args, 0, source, evaluation=False), path)
    assert [len(group) for group in output.samples] == [2, 2]
    assert all(isinstance(sample, Sample) and sample.reward == 1.0 for sample in flat(output))
    evaluated = as_eval_output(fn(args, 0, source, evaluation=True), path)
    assert eval_metrics(evaluated.data)["eval/own/reward"] == 1.0


def test_lists_inside_a_group_are_dissolved():
    one, two, three = Sample(index=1), Sample(index=2), Sample(index=3)
    assert as_train_output([[[one, two], three]], "my.fn").samples == [[one, two, three]]


WRONG = [None, 5, [Sample()], {"a": 1}, [[1]], RolloutFnTrainOutput(samples=[Sample()])]


@pytest.mark.parametrize("result", WRONG)
def test_rollout_functions_that_return_something_else(result):
    with pytest.raises(UserError, match=r"my.fn returned a .*expected RolloutFnTrainOutput"):
        as_train_output(result, "my.fn")


@pytest.mark.parametrize("result", [None, [1.0], {"name": [1.0]}])
def test_eval_functions_that_return_something_else(result):
    with pytest.raises(UserError, match=r"my.fn returned a "):
        as_eval_output(result, "my.fn")


@BOTH
def test_generate(tmp_path, module, engine):
    output = rollout(
        tmp_path, custom_generate_function_path=f"{module.__name__}.custom_generate_function_path"
    )
    assert {(s.response, s.status) for s in flat(output)} == {("ok", Status.COMPLETED)}
    assert all(s.reward in (0.0, 1.0) for s in flat(output))
    if module is good:
        assert engine.requests[-1].sampling_params["temperature"] == 0.5


@BOTH
def test_reward(tmp_path, module, engine):
    output = rollout(tmp_path, rm_type=None, custom_rm_path=f"{module.__name__}.custom_rm_path")
    assert all(s.reward in (0.0, 1.0) and s.status == Status.COMPLETED for s in flat(output))


@BOTH
def test_group_reward(tmp_path, module, engine):
    path = f"{module.__name__}.custom_group_rm_path"
    key = "score" if module is good else None  # one returns dictionaries, the other numbers
    output = rollout(tmp_path, rm_type=None, custom_rm_path=path, group_rm=True, reward_key=key)
    rewards = [s.get_reward_value(key) for s in flat(output)]
    assert rewards == ([0.0, 1.0, 0.0, 1.0] if module is good else [1.0] * 4)


@BOTH
def test_dynamic_filter(tmp_path, module, engine):
    output = rollout(
        tmp_path, dynamic_sampling_filter_path=f"{module.__name__}.dynamic_sampling_filter_path"
    )
    kept = [group[0].group_index for group in output.samples]
    # Two come for the one that is dropped, and end in any order.
    assert len(kept) == 2 and kept == sorted({1, 2, 3} & set(kept))
    reason = "first" if module is good else "filter"
    assert output.metrics[f"rollout/dropped_{reason}"] == 1


@BOTH
def test_buffer_filter(tmp_path, module, engine):
    args = rollout_args(tmp_path, buffer_filter_path=f"{module.__name__}.buffer_filter_path")
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(3))
    taken = [group[0].group_index for group in source.get_samples(2)]
    assert taken == ([1, 2] if module is good else [2, 3])
    assert len(source.buffer) == (1 if module is good else 2)


@BOTH
def test_sample_hook(tmp_path, module, engine):
    path = f"{module.__name__}.rollout_sample_hook_path"
    output = rollout(tmp_path, rollout_sample_hook_path=path)
    assert [len(group) for group in output.samples] == ([3, 2] if module is good else [2, 2])
    assert all(("hooked" in s.metadata) == (module is good) for s in flat(output))


@BOTH
def test_sample_filter_and_all_samples(tmp_path, module, engine):
    output = rollout(
        tmp_path,
        rollout_sample_filter_path=f"{module.__name__}.rollout_sample_filter_path",
        rollout_all_samples_process_path=f"{module.__name__}.rollout_all_samples_process_path",
    )
    assert [s.remove_sample for s in flat(output)] == [module is good, False, False, False]
    assert all(("seen" in s.metadata) == (module is good) for s in flat(output))


@BOTH
def test_data_source(tmp_path, module, engine):
    args = rollout_args(tmp_path, data_source_path=f"{module.__name__}.data_source_path")
    check_hooks(args)
    output = generate_rollout(args, 0, module.data_source_path(args))
    assert [group[0].group_index for group in output.samples] == [0, 1]
    assert {s.status for s in flat(output)} == {Status.COMPLETED}
