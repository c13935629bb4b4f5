"""Hooks, engines and requests that fail inside a rollout of the default function."""

from __future__ import annotations

import threading
import time

import pytest

from slime.core.errors import UserError
from slime.core.types import Status
from slime.rollout.context import RolloutContext
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.engine_pool import EnginePool, EngineUnreachableError
from slime.rollout.samples import is_too_stale
from slime.rollout.sglang_rollout import generate_rollout
from tests import rollout_hooks
from tests.fake_engine import FakeEngine, Reply
from tests.prompts import flat, rollout_args
from tests.tiny import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
HOOKS = "tests.rollout_hooks"


# ---- failures of hooks


def test_reward_that_raises_marks_its_sample_only(tmp_path, fake_engines):
    fake_engines()
    args = rollout_args(tmp_path, custom_rm_path=f"{HOOKS}.reward_fails_on_odd")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    for sample in flat(output):
        if sample.index % 2:
            assert sample.status == Status.FAILED and sample.remove_sample
            assert sample.reward == 0.0
            assert sample.metadata["error"] == f"ValueError: cannot score {sample.index}"
        else:
            assert sample.status == Status.COMPLETED and sample.reward == 1.0
    assert output.metrics["rollout/failed"] == 2
    assert output.metrics["rollout/reward_mean"] == 1.0  # of the samples that have one


def test_the_first_failure_of_each_kind_is_logged_with_its_traceback(
    tmp_path, fake_engines, caplog
):
    fake_engines()
    args = rollout_args(tmp_path, custom_rm_path=f"{HOOKS}.reward_fails_on_odd")
    source = RolloutDataSourceWithBuffer(args)
    for rollout_id in range(2):
        generate_rollout(args, rollout_id, source)
    assert caplog.text.count("Traceback (most recent call last)") == 1
    assert caplog.text.count("in reward_fails_on_odd") == 1
    assert "failed in reward; further failures of this kind are counted only" in caplog.text
    args = rollout_args(tmp_path, custom_generate_function_path=f"{HOOKS}.generate_fails_on_odd")
    generate_rollout(args, 2, RolloutDataSourceWithBuffer(args))
    assert caplog.text.count("Traceback (most recent call last)") == 2


def test_generation_that_raises_leaves_a_row_that_can_be_trained_on_with_no_weight(
    tmp_path, fake_engines
):
    fake_engines()
    args = rollout_args(tmp_path, custom_generate_function_path=f"{HOOKS}.generate_fails_on_odd")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    failed = [s for s in flat(output) if s.status == Status.FAILED]
    assert [s.index for s in failed] == [1, 3]
    for sample in failed:
        assert sample.metadata["error_stage"] == "generate"
        assert 0 < sample.response_length < len(sample.tokens)
        assert sample.loss_mask == [0] and sample.remove_sample


def test_what_a_failure_half_way_leaves_is_thrown_away(tmp_path, fake_engines):
    fake_engines()
    hook = f"{HOOKS}.generate_breaks_half_way"
    args = rollout_args(tmp_path, custom_generate_function_path=hook)
    with pytest.raises(UserError, match="3 entries of loss_mask for 6 response tokens"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    args = args.replace(custom_generate_function_path=f"{HOOKS}.generate_gives_up")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    for sample in flat(output):
        # The trainer runs over every row: one that failed, perhaps for its length, must cost nothing.
        prompt = 1 if sample.status == Status.FAILED else len(sample.prompt)
        assert len(sample.tokens) == prompt + sample.response_length
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        if sample.index % 2:
            status = "aborted" if sample.index == 1 else "failed"
            assert sample.status == Status.FAILED and sample.loss_mask == [0]
            assert f"returned a sample with status {status}" in sample.metadata["error"]


def test_a_prompt_that_leaves_no_room_for_a_response_keeps_its_place(tmp_path, fake_engines):
    (engine,) = fake_engines()
    rows = [{"input": "long prompt", "label": ""}, {"input": "short", "label": ""}]
    args = rollout_args(tmp_path, rows, rollout_max_context_len=8, rollout_max_response_len=2)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    first, second = output.samples[0][0], output.samples[1][0]
    assert (first.status, first.loss_mask, first.response_length) == (Status.TRUNCATED, [0], 1)
    assert second.loss_mask == [1, 1] and {r.prompt for r in engine.requests} == {"short"}


@pytest.mark.parametrize("filter_path", [None, f"{HOOKS}.keep_even_groups"])
def test_all_samples_failing_stops_with_the_first_traceback(tmp_path, fake_engines, filter_path):
    fake_engines()
    args = rollout_args(
        tmp_path,
        custom_rm_path=f"{HOOKS}.reward_always_fails",
        dynamic_sampling_filter_path=filter_path,
    )
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(UserError) as caught:
        generate_rollout(args, 3, source)
    text = str(caught.value)
    assert "every sample of rollout 3 failed" in text and "ValueError: the judge is out" in text
    assert "reward_always_fails" in text  # where it was raised


def test_groups_that_fail_whole_do_not_stop_a_rollout_with_others(tmp_path, fake_engines):
    fake_engines(lambda r: Reply(latency_s=0.0 if int(r.prompt[0]) < 3 else 0.1))
    hook = f"{HOOKS}.reward_fails_on_first_groups"
    args = rollout_args(tmp_path, rollout_batch_size=5, custom_rm_path=hook)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert output.metrics["rollout/failed"] == 6 and output.metrics["rollout/reward_mean"] == 1.0
    args = args.replace(dynamic_sampling_filter_path=f"{HOOKS}.keep_even_groups")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert output.metrics["rollout/dropped_failed"] == 3 and len(output.samples) == 5


def test_a_request_the_engine_refuses_fails_its_sample(tmp_path, fake_engines):
    def script(request):
        if request.prompt.startswith("1"):
            return Reply(text="The input is too long", status=400)
        return Reply()

    (engine,) = fake_engines(script)
    args = rollout_args(tmp_path)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    failed = [s for s in flat(output) if s.status == Status.FAILED]
    assert [s.index for s in failed] == [2, 3]
    assert "The input is too long" in failed[0].metadata["error"]
    assert len(engine.requests) == 4  # not repeated


def test_misaligned_columns_of_a_custom_generate_are_caught(tmp_path, fake_engines):
    fake_engines()
    args = rollout_args(tmp_path, custom_generate_function_path=f"{HOOKS}.generate_misaligned")
    with pytest.raises(UserError, match=r"1 entries of loss_mask for 3 response tokens"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_blocking_reward_does_not_hold_up_generation(tmp_path, fake_engines):
    """One request at a time, and no reward comes back before the last one is made."""
    fake_engines(rollout_hooks.opening_at(15), concurrency=1)
    args = rollout_args(tmp_path, rollout_batch_size=8, custom_rm_path=f"{HOOKS}.reward_blocking")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.reward for s in flat(output)] == [1.0] * 16


# ---- engines that fail


def test_requests_move_to_another_engine_when_one_dies(tmp_path, fake_engines):
    both = fake_engines(count=2)
    both[0].script = lambda request: Reply(latency_s=300.0)
    both[1].script = lambda request: Reply(until=lambda: len(both[0].requests) >= 16)
    args = rollout_args(tmp_path, rollout_batch_size=8, n_samples_per_prompt=4)

    def stop_one_once_it_is_busy():
        while both[0].in_flight < 16:
            time.sleep(0.01)
        both[0].stop()

    threading.Thread(target=stop_one_once_it_is_busy, daemon=True).start()
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {s.status for s in flat(output)} == {Status.COMPLETED}
    assert len(flat(output)) == 32 and len(both[1].requests) == 32


def test_server_errors_are_tried_again(tmp_path, fake_engines):
    def script(request):
        return Reply(text="busy", status=503) if request.number % 3 == 0 else Reply(text="done")

    fake_engines(script)
    args = rollout_args(tmp_path)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {s.response for s in flat(output)} == {"done"}


def test_dropped_connections_are_tried_again(tmp_path, fake_engines):
    fake_engines(lambda r: Reply(drop=True) if r.number < 3 else Reply(text="done"))
    args = rollout_args(tmp_path)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {s.response for s in flat(output)} == {"done"}


def test_no_engine_at_all_is_one_clear_error_and_loses_no_group(tmp_path, fake_engines):
    (engine,) = fake_engines(deadline_s=0.5)
    engine.stop()
    args = rollout_args(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    with pytest.raises(EngineUnreachableError) as caught:
        generate_rollout(args, 0, source)
    assert engine.url in str(caught.value)
    assert [g[0].group_index for g in source.buffer] == [0, 1]
    engine.restart()
    again = generate_rollout(args, 0, source)
    assert [g[0].group_index for g in again.samples] == [0, 1]


def test_requests_on_an_engine_that_is_removed_are_made_again(tmp_path, use_pool):
    """A hung engine answers nothing; the health check takes it out of the pool."""
    hung = FakeEngine(lambda request: Reply(latency_s=300.0))
    good = FakeEngine(lambda request: Reply(text="done"))
    with hung, good:
        pool = EnginePool([hung.url, good.url])
        use_pool(pool)
        args = rollout_args(tmp_path, rollout_batch_size=4)

        def remove_it_once_it_has_requests():
            while not hung.requests:
                time.sleep(0.01)
            pool.set_urls([good.url])

        threading.Thread(target=remove_it_once_it_has_requests, daemon=True).start()
        output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
        assert {s.response for s in flat(output)} == {"done"}
        assert hung.requests and sum(pool.in_flight.values()) == 0


def test_engines_may_arrive_after_generation_began(tmp_path, use_pool):
    with FakeEngine() as engine:
        pool = EnginePool([])
        use_pool(pool)
        args = rollout_args(tmp_path)
        threading.Timer(0.2, pool.set_urls, [[engine.url]]).start()
        output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
        assert len(flat(output)) == 4


def test_a_failed_sample_is_of_no_age(tmp_path, fake_engines):
    """Its place is held by a token of version 0, which is no sign of old weights."""
    spans = [{"version": "7", "start": 0, "end": 3}]
    fake_engines(lambda r: Reply(status=400) if r.prompt.startswith("1") else Reply(versions=spans))
    args = rollout_args(tmp_path, max_weight_staleness=2)
    clock = RolloutContext.current().clock
    clock.set(7, 0)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    old = [group for group in output.samples if is_too_stale(args, 0, group, clock)]
    assert output.metrics["rollout/failed"] == 2 and old == []
    assert not [name for name in output.metrics if "stale" in name]


def test_a_request_that_engines_refuse_is_reported_in_one_line_with_the_flags(
    tmp_path, fake_engines
):
    answer = "The input (9 tokens) is longer than the model's context length (8 tokens)."
    fake_engines(lambda request: Reply(text=answer, status=400))
    args = rollout_args(tmp_path)
    with pytest.raises(UserError) as caught:
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    head, line = str(caught.value).splitlines()
    assert head == "every sample of rollout 0 failed, the first one in generate:"
    assert answer in line and "--rollout-max-prompt-len" in line
