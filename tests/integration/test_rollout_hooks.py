"""Custom generation, rewards, filters and buffers inside a whole rollout."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from slime.core.errors import ConfigError, UserError
from slime.core.types import Status
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from tests import rollout_hooks
from tests.fake_engine import Reply
from tests.prompts import flat, rollout_args
from tests.tiny import make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
HOOKS = "tests.rollout_hooks"


def run_once(tmp_path, **overrides):
    args = rollout_args(tmp_path, **overrides)
    return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))


def test_two_turns_with_a_tool_between_them(tmp_path, fake_engines):
    (engine,) = fake_engines(lambda request: Reply(text="ab"))
    output = run_once(
        tmp_path,
        custom_generate_function_path=f"{HOOKS}.generate_two_turns",
        rollout_max_response_len=9,
    )
    for sample in flat(output):
        assert sample.loss_mask == [1, 1, 1, 0, 0, 0, 1, 1, 1]
        assert sample.rollout_log_probs[3:6] == [0.0] * 3
        assert sample.response == "ab<tool>ab" and sample.status == Status.COMPLETED
    second = [r for r in engine.requests if len(r.input_ids) > 4]
    assert {r.sampling_params["max_new_tokens"] for r in second} == {9 - 6}
    assert set(rollout_hooks.seen) == {("evaluation", False)}


@pytest.mark.parametrize("threads", [1, 2])
def test_blocking_rewards_share_the_threads_that_are_asked_for(tmp_path, fake_engines, threads):
    """Four rewards of 0.3 s take 1.2 s one after another. The time in which any of them ran is a metric."""
    fake_engines()
    hook = f"{HOOKS}.reward_waiting"
    output = run_once(tmp_path, custom_rm_path=hook, reward_num_threads=threads)
    assert output.metrics["perf/reward_time"] >= 4 * 0.3 / threads
    together = run_once(tmp_path, custom_rm_path=f"{HOOKS}.reward_of_four", reward_num_threads=4)
    assert together.metrics["rollout/failed"] == 0 and together.metrics["perf/reward_time"] > 0


def test_several_samples_of_one_execution_share_its_rollout_id(tmp_path, fake_engines):
    fake_engines()
    output = run_once(tmp_path, custom_generate_function_path=f"{HOOKS}.generate_two_samples")
    assert [len(group) for group in output.samples] == [4, 4]
    assert [s.rollout_id for s in flat(output)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [s.group_index for s in flat(output)] == [0] * 4 + [1] * 4
    assert len({s.index for s in flat(output)}) == 8
    assert {s.reward for s in flat(output)} <= {0.0, 1.0}


def test_hooks_may_score_and_leave_metadata_for_the_trainer(tmp_path, fake_engines):
    fake_engines()
    output = run_once(
        tmp_path,
        custom_generate_function_path=f"{HOOKS}.generate_with_metadata",
        custom_rm_path=f"{HOOKS}.reward_length",
    )
    assert {s.reward for s in flat(output)} == {2.0}
    assert all(s.train_metadata == {"turns": 1} for s in flat(output))


def test_samples_override_both_functions(tmp_path, fake_engines):
    fake_engines()
    args = rollout_args(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].custom_rm_path = f"{HOOKS}.reward_length"
    group[1].generate_function_path = f"{HOOKS}.generate_with_metadata"
    source.add_samples([group])
    output = generate_rollout(args, 0, source)
    first, second = output.samples[0]
    assert first.reward == 2.0 and first.train_metadata is None
    assert second.train_metadata == {"turns": 1}


def test_wrong_path_on_a_sample_stops_the_run(tmp_path, fake_engines):
    fake_engines()
    args = rollout_args(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    group[0].custom_rm_path = f"{HOOKS}.not_there"
    source.add_samples([group])
    with pytest.raises(ConfigError, match=r"sample.custom_rm_path .*not_there"):
        generate_rollout(args, 0, source)


def test_group_reward_sees_the_group(tmp_path, fake_engines):
    fake_engines()
    output = run_once(
        tmp_path, group_rm=True, custom_rm_path=f"{HOOKS}.reward_group", n_samples_per_prompt=3
    )
    assert [[s.reward for s in g] for g in output.samples] == [[0.0, 1.0, 2.0]] * 2


def test_group_reward_of_the_wrong_length_fails_the_group(tmp_path, fake_engines):
    fake_engines()
    with pytest.raises(UserError, match="returned 1 rewards for a group of 2"):
        run_once(tmp_path, group_rm=True, custom_rm_path=f"{HOOKS}.reward_group_short")


def test_dictionary_rewards_need_their_key(tmp_path, fake_engines):
    fake_engines()
    output = run_once(tmp_path, custom_rm_path=f"{HOOKS}.reward_dictionary", reward_key="score")
    assert output.metrics["rollout/reward_mean"] == 0.5
    with pytest.raises(UserError, match=r"--reward-key to one of \['detail', 'score'\]"):
        run_once(tmp_path, custom_rm_path=f"{HOOKS}.reward_dictionary")


def test_a_timeout_of_the_hook_keeps_its_message(tmp_path, fake_engines):
    fake_engines()
    with pytest.raises(UserError, match="TimeoutError: the judge did not answer"):
        run_once(tmp_path, custom_rm_path=f"{HOOKS}.reward_times_out")


def test_sample_hook_sees_each_sample_once_with_its_reward(tmp_path, fake_engines):
    fake_engines()
    args = rollout_args(
        tmp_path,
        custom_rm_path=f"{HOOKS}.reward_length",
        rollout_sample_hook_path=f"{HOOKS}.hook_that_notes",
    )
    source = RolloutDataSourceWithBuffer(args)
    (group,) = source.get_samples(1)
    first = group[0]  # finished in an earlier rollout, which called the hook
    first.tokens, first.status, first.reward = [1], Status.COMPLETED, 9.0
    first.append_response_tokens(tokens=[2], log_probs=[-1.0])
    source.add_samples([group])
    output = generate_rollout(args, 0, source)
    assert sorted(rollout_hooks.seen) == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert [s.reward for s in flat(output)] == [9.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("group_rm", [False, True])
def test_sample_hook_may_split_a_trajectory_before_the_filters(tmp_path, fake_engines, group_rm):
    fake_engines()
    output = run_once(
        tmp_path,
        group_rm=group_rm,
        custom_rm_path=f"{HOOKS}.reward_{'group' if group_rm else 'length'}",
        custom_generate_function_path=f"{HOOKS}.generate_two_samples",
        rollout_sample_hook_path=f"{HOOKS}.hook_that_splits",
        rollout_all_samples_process_path=f"{HOOKS}.note_all_groups",
    )
    assert [len(group) for group in output.samples] == [8, 8]
    assert [s.rollout_id for s in flat(output)] == [i for i in range(4) for _ in range(4)]
    assert len({s.index for s in flat(output)}) == 16
    assert [s.reward for s in flat(output)] == [0.25, 0.75] * 8
    assert output.metrics["rollout/reward_mean"] == 0.5


def test_sample_hook_that_fails_marks_its_sample_only(tmp_path, fake_engines):
    fake_engines()
    output = run_once(tmp_path, rollout_sample_hook_path=f"{HOOKS}.hook_that_fails_on_odd")
    samples = flat(output)
    assert [s.status for s in samples] == [Status.COMPLETED, Status.FAILED] * 2
    assert {s.metadata["error_stage"] for s in samples[1::2]} == {"sample hook"}
    assert all(len(s.tokens) > s.response_length > 0 for s in samples)


@pytest.mark.parametrize(
    ("hook", "sentence"),
    [
        ("hook_without_reward", "hook_without_reward returned None; expected a number"),
        ("hook_that_drops", r"returned \[\]; expected a Sample or a list of Samples"),
    ],
)
def test_sample_hook_with_a_wrong_result_is_reported(tmp_path, fake_engines, hook, sentence):
    fake_engines()
    with pytest.raises(UserError, match=sentence):
        run_once(tmp_path, rollout_sample_hook_path=f"{HOOKS}.{hook}")


def test_sample_filter_and_all_samples_hook(tmp_path, fake_engines):
    fake_engines(lambda r: Reply(text="a" if r.prompt.startswith("0") else "aaaa"))
    output = run_once(
        tmp_path,
        rollout_sample_filter_path=f"{HOOKS}.remove_long",
        rollout_all_samples_process_path=f"{HOOKS}.note_all_groups",
    )
    assert [s.remove_sample for s in flat(output)] == [False, False, True, True]
    assert rollout_hooks.seen == [("all", [0, 1], 10)]


def test_buffer_filter_decides_who_comes_first(tmp_path, fake_engines):
    fake_engines()
    args = rollout_args(tmp_path, buffer_filter_path=f"{HOOKS}.newest_first")
    source = RolloutDataSourceWithBuffer(args)
    source.add_samples(source.get_samples(3))
    output = generate_rollout(args, 6, source)
    assert [g[0].group_index for g in output.samples] == [1, 2]
    assert ("rollout_id", 6) in rollout_hooks.seen
    assert [g[0].group_index for g in source.buffer] == [0]


def test_remote_rewards_are_retried(tmp_path, fake_engines):
    (engine,) = fake_engines()
    posted = []

    async def judge(request):
        posted.append(await request.json())
        if len(posted) <= 2:
            return web.Response(status=500)
        return web.json_response({"score": 0.75})

    async def add_route():
        app = web.Application()
        app.router.add_post("/judge", judge)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    loop = engine._loop
    runner = asyncio.run_coroutine_threadsafe(add_route(), loop).result()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/judge"
    try:
        output = run_once(tmp_path, rm_type="remote_rm", rm_url=url, reward_key="score")
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    assert output.metrics["rollout/reward_mean"] == 0.75 and len(posted) == 6
    assert {"prompt": "0+1=", "response": "ok", "label": "1"} in posted
