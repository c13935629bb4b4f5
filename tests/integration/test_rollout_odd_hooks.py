"""User code that does what no hook should: the run goes on or stops with one clear sentence, never hangs."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from pathlib import Path

import pytest

from slime.core.errors import UserError
from slime.core.types import Status
from slime.rollout.context import RolloutContext
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.hook_calls import (
    HookCall,
    HookCalls,
    HookQueue,
    HookTimer,
    call_function,
    in_thread,
    run_hook,
)
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import samples_to_batch
from slime.utils import http
from tests import rollout_hooks
from tests.fake_engine import Reply
from tests.prompts import flat, rollout_args

HOOKS = "tests.odd_hooks"


def run_once(tmp_path, rows=None, **overrides):
    args = rollout_args(tmp_path, rows, **overrides)
    return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def within(seconds, call):
    """The result of the call; AssertionError if it hangs."""
    got: list = []

    def body():
        try:
            got.append((call(), None))
        except BaseException as error:
            got.append((None, error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(body,), daemon=True)
    thread.start()
    thread.join(seconds)
    assert got, f"nothing came back within {seconds} s"
    result, error = got[0]
    if error is not None:
        raise error
    return result


@pytest.mark.parametrize(
    "flags",
    [
        {"custom_generate_function_path": f"{HOOKS}.generate_that_exits"},
        {"custom_rm_path": f"{HOOKS}.reward_that_exits"},
        {"custom_rm_path": f"{HOOKS}.plain_reward_that_exits"},
    ],
)
def test_what_is_no_exception_fails_its_sample_too(tmp_path, fake_engines, flags):
    """An exit or a cancellation of the hook's own must not end the event loop, or look like an abort."""
    fake_engines()
    output = within(120, lambda: run_once(tmp_path, **flags))
    samples = flat(output)
    assert [s.status for s in samples] == [Status.FAILED] * 3 + [Status.COMPLETED]
    errors = [s.metadata["error"] for s in samples[:3]]
    assert "SystemExit" in errors[0] and "3" in errors[0]
    assert "Unusual" in errors[1] and "CancelledError" in errors[2]
    again = within(120, lambda: run_once(tmp_path))  # the loop is alive
    assert {s.status for s in flat(again)} == {Status.COMPLETED}


def test_a_hook_that_ignores_cancellation_does_not_hold_up_the_end_of_a_rollout(
    tmp_path, fake_engines, caplog
):
    fake_engines()
    hook = f"{HOOKS}.generate_that_ignores_cancellation"
    flags = {"rollout_batch_size": 1, "over_sampling_batch_size": 3, "n_samples_per_prompt": 1}
    output = within(120, lambda: run_once(tmp_path, custom_generate_function_path=hook, **flags))
    assert [s.index for s in flat(output)] == [0]
    assert "was cancelled but is still running" in caplog.text


def test_a_hook_that_does_not_come_back_is_named_with_its_place(tmp_path, fake_engines):
    fake_engines()
    hook = f"{HOOKS}.generate_that_ignores_cancellation"
    args = rollout_args(tmp_path, custom_generate_function_path=hook, rollout_batch_size=2)
    source = RolloutDataSourceWithBuffer(args)
    progress = RolloutContext.current().progress
    others = progress.current().hook_calls
    context = contextvars.copy_context()
    threading.Thread(
        target=context.run, args=(generate_rollout, args, 0, source), daemon=True
    ).start()
    stuck: list[HookCall] = []
    deadline = time.monotonic() + 120
    while not stuck:  # the calls of the first prompt come back
        assert time.monotonic() < deadline
        time.sleep(0.05)
        calls = progress.current().hook_calls
        under_way = [] if calls is others else calls.running()
        stuck = [c for c in under_way if "in generate_that_ignores_cancellation" in c.location]
    assert {call.name for call in stuck} == {f"--custom-generate-function-path {hook}"}


@pytest.mark.parametrize("hook", ["reward_stuck", "reward_stuck_async"])
def test_the_place_of_a_reward_that_hangs_is_the_users_line(hook):
    """Also of one that hangs in a thread, or in a library on the second event loop."""
    lines = Path(rollout_hooks.__file__).read_text().splitlines()
    told = [n for n, line in enumerate(lines, 1) if line.endswith("# the line that is told")]
    calls = HookCalls()

    async def place():
        fn = getattr(rollout_hooks, hook)
        call = call_function(fn, None, None, name="r", kind="x", timeout_s=60, calls=calls)
        task = asyncio.create_task(call)
        found = []
        while not found or "rollout_hooks.py" not in found[0].location:
            await asyncio.sleep(0.02)
            found = calls.running()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found[0].location

    where = http.run(asyncio.wait_for(place(), 60))
    line = told[hook.endswith("async")]
    assert where == f"{rollout_hooks.__file__}:{line} in {hook}"


@pytest.mark.parametrize(
    ("hook", "flags", "errors"),
    [
        ("reward_infinite", {}, ["returned inf", "returned nan", "returned None"]),
        (
            "reward_dictionary_without_numbers",
            {"reward_key": "score"},
            ["'score' of the reward returned inf", "returned None", "returned '0.5'"],
        ),
        (
            "reward_now_and_then_a_dictionary",
            {"reward_key": "score"},
            ["is a number, not a dictionary: remove --reward-key score"] * 2,
        ),
    ],
)
def test_rewards_that_are_no_numbers_fail_their_sample(tmp_path, fake_engines, hook, flags, errors):
    fake_engines()
    output = run_once(tmp_path, custom_rm_path=f"{HOOKS}.{hook}", **flags)
    samples = flat(output)
    for sample, error in zip(samples, errors, strict=False):
        assert sample.status == Status.FAILED and error in sample.metadata["error"]
    assert samples[3].status == Status.COMPLETED
    assert output.metrics["rollout/reward_mean"] == 1.0


def test_rewards_of_a_generate_function_must_be_numbers_too(tmp_path, fake_engines):
    """The third sample has none, so that --custom-rm-path scores it: None again."""
    fake_engines()
    output = run_once(
        tmp_path,
        custom_generate_function_path=f"{HOOKS}.generate_with_reward_infinite",
        custom_rm_path=f"{HOOKS}.reward_infinite",
    )
    samples = flat(output)
    for sample, error in zip(samples, ["inf", "nan", "None"], strict=False):
        assert sample.status == Status.FAILED and f"returned {error}" in sample.metadata["error"]
    assert samples[3].status == Status.COMPLETED and samples[3].reward == 1.0


def test_a_plain_reward_may_raise_stop_iteration(tmp_path, fake_engines):
    """Which no future takes: without care the rollout would wait for it forever."""
    fake_engines()
    hook = f"{HOOKS}.plain_reward_that_stops_iterating"
    output = within(120, lambda: run_once(tmp_path, custom_rm_path=hook))
    statuses = [Status.COMPLETED] * 2 + [Status.FAILED] * 2
    assert [s.status for s in flat(output)] == statuses
    assert "StopIteration" in flat(output)[3].metadata["error"]


def test_a_plain_reward_may_return_a_coroutine(tmp_path, fake_engines):
    fake_engines()
    hook = f"{HOOKS}.reward_that_returns_a_coroutine"
    assert {s.reward for s in flat(run_once(tmp_path, custom_rm_path=hook))} == {2.0}


def test_user_code_that_never_returns_is_given_up_on_and_holds_nobody_up():
    """More of it than there are threads: the next call still gets one."""
    never = threading.Event()

    async def scenario():
        calls = [in_thread(never.wait, 600, num_threads=3) for _ in range(4)]
        given_up = await asyncio.gather(
            *(run_hook(call, name="--custom-rm-path x", timeout_s=0.3) for call in calls),
            return_exceptions=True,
        )
        return given_up, await asyncio.wait_for(in_thread(sum, [1, 2], num_threads=3), 60)

    given_up, three = asyncio.run(scenario())
    never.set()
    assert [str(error) for error in given_up] == ["--custom-rm-path x took longer than 0 s"] * 4
    assert three == 3


def test_a_call_is_seen_by_its_own_rollout_only_and_until_it_ends():
    async def scenario():
        mine, others = HookCalls(), HookCalls()
        call = run_hook(asyncio.sleep(0.05, "done"), name="hook", timeout_s=10, calls=mine)
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        seen = [call.name for call in mine.running()], others.running()
        return seen, await task, mine.running()

    assert asyncio.run(scenario()) == ((["hook"], []), "done", [])


def test_waiting_behind_other_slow_calls_is_no_reason_to_be_given_up_on():
    """It counts half the time since another one ended, and all of its own; `run_hook` uses that."""
    queue = HookQueue()
    waiting, other = HookTimer(queue), HookTimer(queue)
    time.sleep(0.2)
    assert waiting.elapsed_s >= 0.1
    start = time.monotonic()
    with other.running():
        pass
    seconds = waiting.elapsed_s
    assert seconds <= (time.monotonic() - start) / 2
    with waiting.running():
        time.sleep(0.2)
        assert waiting.elapsed_s >= 0.2

    class Waits(HookTimer):
        elapsed_s = 0.0  # type: ignore[assignment]

    call = run_hook(
        asyncio.sleep(0.3, "done"), name="hook", timeout_s=0.1, timer=Waits(HookQueue())
    )
    assert asyncio.run(call) == "done"


def test_a_call_that_takes_too_long_itself_makes_room_for_those_behind_it():
    never = threading.Event()

    queue = HookQueue()

    async def one(work, timeout_s):
        timer = HookTimer(queue)

        def body():
            with timer.running():
                work()

        await run_hook(
            in_thread(body, num_threads=1), name="hook", timeout_s=timeout_s, timer=timer
        )

    async def scenario():
        calls = one(int, 300.0), one(lambda: never.wait(300), 1.0), one(int, 300.0)
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second, third = asyncio.run(scenario())
    never.set()
    assert first is third is None and str(second) == "hook took longer than 1 s"


def test_samples_that_a_hook_made_itself_can_be_trained_on(tmp_path, fake_engines):
    fake_engines()
    args = rollout_args(tmp_path, custom_generate_function_path=f"{HOOKS}.generate_fresh_samples")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    batch = samples_to_batch(args, flat(output))
    assert batch.sample_indices.tolist() == batch.trajectory_ids.tolist() == [0, 1, 2, 3]
    assert batch.group_indices.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"custom_generate_function_path": f"{HOOKS}.generate_one_twice"},
            "returned the same sample twice",
        ),
        (
            {"custom_generate_function_path": f"{HOOKS}.generate_nothing"},
            r"returned \[None\]; expected a Sample",
        ),
        (
            {"dynamic_sampling_filter_path": f"{HOOKS}.filter_without_a_return"},
            "filter_without_a_return returned None; expected a bool",
        ),
        (
            {"dynamic_sampling_filter_path": f"{HOOKS}.filter_with_a_pair"},
            r"filter_with_a_pair returned \(False, 'why'\); expected a bool",
        ),
    ],
)
def test_a_wrong_result_is_reported(tmp_path, fake_engines, flags, message):
    fake_engines()
    with pytest.raises(UserError, match=message):
        run_once(tmp_path, **flags)


def test_what_a_hook_does_to_its_sample_reaches_no_other(tmp_path, fake_engines):
    """Messages, metadata and sampling parameters are each sample's own, in every epoch."""
    (engine,) = fake_engines(lambda request: Reply(text="abcdefgh"))
    rows = [{"input": [{"role": "user", "content": "1+1="}], "metadata": {"notes": []}}]
    hook = f"{HOOKS}.generate_that_edits_what_it_was_given"
    args = rollout_args(
        tmp_path, rows, label_key=None, custom_generate_function_path=hook,
        rollout_max_response_len=8, rollout_batch_size=2, n_samples_per_prompt=3,
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    for rollout_id in range(2):
        samples = flat(generate_rollout(args, rollout_id, source))
        assert [s.metadata.get("error") for s in samples] == [None] * 6
        assert all(len(s.prompt) == 2 and s.metadata["notes"] == ["seen"] for s in samples)
    assert {r.sampling_params["max_new_tokens"] for r in engine.requests} == {3}
