"""The default rollout function against scripted engines over HTTP."""

from __future__ import annotations

import random

from slime.core.types import Status
from slime.rollout.context import RolloutContext
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sampling import hash32
from slime.rollout.sglang_rollout import generate_rollout
from tests import rollout_hooks
from tests.fake_engine import Reply
from tests.prompts import flat, rollout_args, sums
from tests.tiny import EOS_ID, make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
HOOKS = "tests.rollout_hooks"


def answer(request):
    """The right answer on every second request."""
    left, right = request.prompt.removesuffix("=").split("+")
    value = int(left) + int(right) if request.number % 2 else -1
    return Reply(text=rf"\boxed{{{value}}}", latency_s=0.005)


def test_samples_carry_tokens_log_probs_versions_and_rewards(tmp_path, fake_engines):
    (engine,) = fake_engines(answer)
    engine.weight_version = "7"
    args = rollout_args(tmp_path, rm_type="math", rollout_batch_size=4, n_samples_per_prompt=2)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.index for s in flat(output)] == list(range(8))
    for sample in flat(output):
        prompt = TOKENIZER.encode(sample.prompt)
        response = [*TOKENIZER.encode(sample.response), EOS_ID]
        assert sample.tokens == prompt + response
        assert sample.response_length == len(response) == len(sample.loss_mask)
        assert sample.rollout_log_probs == [-0.5 - i / 100 for i in range(len(response))]
        assert sample.weight_versions == [7] * len(response)
        assert sample.status == Status.COMPLETED
        assert sample.reward == float(sample.response == rf"\boxed{{{sample.label}}}")
    assert output.metrics["rollout/reward_mean"] == 0.5
    assert {tuple(r.input_ids) for r in engine.requests} == {
        tuple(TOKENIZER.encode(row["input"])) for row in sums(4)
    }


def test_sampling_parameters_reach_the_engine(tmp_path, fake_engines):
    (engine,) = fake_engines()
    args = rollout_args(
        tmp_path, rollout_temperature=0.7, rollout_top_p=0.9, rollout_top_k=5,
        rollout_stop=["</end>"], rollout_stop_token_ids=[9], rollout_max_response_len=11,
    )  # fmt: skip
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert engine.requests[0].sampling_params == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 11,
        "stop": ["</end>"], "stop_token_ids": [9], "no_stop_trim": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip


def test_status_and_length_limits(tmp_path, fake_engines):
    fake_engines(lambda request: Reply(text="abcdefgh"))
    args = rollout_args(tmp_path, rollout_max_response_len=5)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {(s.status, s.response) for s in flat(output)} == {(Status.TRUNCATED, "abcde")}
    assert output.metrics["rollout/truncated"] == 1.0

    args = rollout_args(tmp_path, rollout_max_context_len=7, rollout_max_response_len=5)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {len(s.tokens) for s in flat(output)} == {7}  # prompts have 4 tokens


def test_weight_versions_follow_the_spans(tmp_path, fake_engines):
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    fake_engines(lambda request: Reply(text="abc", versions=spans))
    args = rollout_args(tmp_path)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert flat(output)[0].weight_versions == [3, 3, 4, 4]


def test_result_order_does_not_depend_on_timing(tmp_path, fake_engines):
    dice = random.Random(3)
    fake_engines(lambda request: Reply(text=request.prompt, latency_s=dice.random() * 0.1))
    args = rollout_args(tmp_path, sums(40), rollout_batch_size=20, n_samples_per_prompt=3)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.index for s in flat(output)] == list(range(60))
    assert all(s.response == s.prompt for s in flat(output))


def test_concurrency_is_bounded_per_engine_and_balanced(tmp_path, fake_engines):
    """No engine answers before it is full, nor much faster than the other one."""
    both = fake_engines(count=2, concurrency=8)

    def answers_like(engine, other):
        def may_answer(number):
            got = len(engine.requests) + len(other.requests)
            return engine.max_in_flight >= 8 and (len(other.requests) > number - 8 or got == 160)

        return lambda request: Reply(until=lambda: may_answer(request.number))

    for engine, other in (both, reversed(both)):
        engine.script = answers_like(engine, other)
    args = rollout_args(tmp_path, sums(40), rollout_batch_size=40, n_samples_per_prompt=4)
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [engine.max_in_flight for engine in both] == [8, 8]
    counts = [len(engine.requests) for engine in both]
    assert sum(counts) == 160 and min(counts) > 60


def test_samples_of_a_group_share_an_engine_for_its_prefix_cache(tmp_path, fake_engines):
    def all_are_there():
        return sum(len(engine.requests) for engine in both) == 40

    both = fake_engines(lambda request: Reply(until=all_are_there), count=2)
    args = rollout_args(tmp_path, sums(10), rollout_batch_size=10, n_samples_per_prompt=4)
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    places = [{request.prompt for request in engine.requests} for engine in both]
    assert not places[0] & places[1] and all(len(place) == 5 for place in places)


def test_deterministic_mode_seeds_each_sample_from_its_index(tmp_path, fake_engines):
    (engine,) = fake_engines()
    args = rollout_args(tmp_path).replace(deterministic=True, rollout_seed=5)
    generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    seeds = sorted(request.sampling_params["sampling_seed"] for request in engine.requests)
    assert seeds == sorted(hash32(5, index) for index in range(4))
    assert all(0 <= seed < 2**31 for seed in seeds)


# ---- surplus, filters, aborts: nothing lost, nothing twice


def accounted(source, outputs, dropped):
    """Every group handed out is kept, dropped or in the buffer, exactly once."""
    kept = [group[0].group_index for output in outputs for group in output.samples]
    waiting = [group[0].group_index for group in source.buffer]
    assert sorted(kept + waiting + dropped) == list(range(source.next_group_index))
    assert not source._in_flight


def test_surplus_groups_go_back_and_come_first_next_time(tmp_path, fake_engines):
    slow = {"3+1=", "4+1="}
    fake_engines(lambda r: Reply(latency_s=300.0 if r.prompt in slow else 0.01))
    args = rollout_args(tmp_path, rollout_batch_size=4, over_sampling_batch_size=6)
    source = RolloutDataSourceWithBuffer(args)
    first = generate_rollout(args, 0, source)
    assert [g[0].group_index for g in first.samples] == [0, 1, 2, 5]
    assert [g[0].group_index for g in source.buffer] == [3, 4]
    for sample in [s for g in source.buffer for s in g]:
        assert sample.response_length == 0 and sample.status == Status.PENDING
        assert sample.tokens == TOKENIZER.encode(sample.prompt)
    accounted(source, [first], [])
    slow.clear()
    second = generate_rollout(args.replace(over_sampling_batch_size=4), 1, source)
    assert [g[0].group_index for g in second.samples] == [3, 4, 6, 7]
    accounted(source, [first, second], [])


def test_many_rollouts_with_filter_and_surplus_account_for_every_group(tmp_path, fake_engines):
    dice = random.Random(1)
    fake_engines(lambda request: Reply(latency_s=dice.random() * 0.02), count=2, concurrency=8)
    args = rollout_args(
        tmp_path, sums(7), rollout_batch_size=3, over_sampling_batch_size=5, rollout_shuffle=True,
        dynamic_sampling_filter_path=f"{HOOKS}.keep_even_groups",
        rollout_all_samples_process_path=f"{HOOKS}.note_all_groups",
    )  # fmt: skip
    source = RolloutDataSourceWithBuffer(args)
    outputs = [generate_rollout(args, rollout_id, source) for rollout_id in range(6)]
    decided = [index for _, indices, _ in rollout_hooks.seen for index in indices]
    dropped = [index for index in decided if index % 2]
    accounted(source, outputs, dropped)
    assert all(len(output.samples) == 3 for output in outputs)
    assert sum(o.metrics.get("rollout/dropped_odd_group", 0) for o in outputs) == len(dropped)
    indices = [s.index for output in outputs for s in flat(output)]
    assert len(indices) == len(set(indices))


def test_filter_may_return_a_bool(tmp_path, fake_engines):
    fake_engines()
    args = rollout_args(tmp_path, dynamic_sampling_filter_path=f"{HOOKS}.keep_as_bool")
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [g[0].group_index for g in output.samples] == [2, 3]
    assert output.metrics["rollout/dropped_filter"] == 2


def test_zero_std_filter_of_the_hub(tmp_path, fake_engines):
    fake_engines(answer)
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    args = rollout_args(tmp_path, rm_type="math", dynamic_sampling_filter_path=path)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert output.metrics["rollout/zero_std_groups"] == 0
    assert all({s.reward for s in group} == {0.0, 1.0} for group in output.samples)


def test_deterministic_mode_picks_groups_by_order_not_by_speed(tmp_path, fake_engines):
    dice = random.Random(7)
    fake_engines(lambda request: Reply(latency_s=dice.random() * 0.05))

    def picked():
        args = rollout_args(
            tmp_path, rollout_batch_size=3, over_sampling_batch_size=6,
            dynamic_sampling_filter_path=f"{HOOKS}.keep_even_groups",
        ).replace(deterministic=True)  # fmt: skip
        source = RolloutDataSourceWithBuffer(args)
        outputs = [generate_rollout(args, i, source) for i in range(3)]
        kept = [[g[0].group_index for g in output.samples] for output in outputs]
        return kept, [g[0].group_index for g in source.buffer]

    first = picked()
    assert first[0][0] == [0, 2, 4] and first == picked()


def test_partial_rollout_continues_where_it_was_cut(tmp_path, fake_engines):
    text = "abcdefghij" * 2
    stalled = {"2+1="}

    def script(request):
        prompt, _, done = request.prompt.partition("=")
        if f"{prompt}=" in stalled:
            return Reply(text=text[len(done) :], latency_s=300.0, aborted_after=7)
        return Reply(text=text[len(done) :], until=lambda: len(engine.requests) >= 3)

    (engine,) = fake_engines(script)
    args = rollout_args(
        tmp_path, rollout_batch_size=2, over_sampling_batch_size=3, n_samples_per_prompt=1
    ).replace(partial_rollout=True)
    source = RolloutDataSourceWithBuffer(args)
    first = generate_rollout(args, 0, source)
    assert [g[0].group_index for g in first.samples] == [0, 1]
    partial = source.buffer[0][0]
    assert partial.status == Status.ABORTED and partial.response_length == 7
    cut, old_log_probs = partial.response_length, list(partial.rollout_log_probs)
    assert partial.response == text[:7]
    stalled.clear()
    engine.weight_version = "9"
    args = args.replace(over_sampling_batch_size=2)
    second = generate_rollout(args, 1, source)
    resumed = next(s for s in flat(second) if s.group_index == 2)
    assert resumed.response == text and resumed.status == Status.COMPLETED
    assert resumed.rollout_log_probs[:cut] == old_log_probs
    assert resumed.weight_versions == [0] * cut + [9] * (len(text) + 1 - cut)
    assert resumed.loss_mask == [1] * (len(text) + 1)
    assert engine.requests[-1].sampling_params["max_new_tokens"] <= 32


def test_partial_rollout_can_mask_older_tokens(tmp_path, fake_engines):
    stalled = {"2"}

    def script(request):
        if request.prompt[0] in stalled:
            return Reply(text="abcdef", latency_s=300.0, aborted_after=2)
        return Reply(text="abcdef", until=lambda: len(engine.requests) >= 3)

    (engine,) = fake_engines(script)
    args = rollout_args(
        tmp_path, rollout_batch_size=2, over_sampling_batch_size=3, n_samples_per_prompt=1
    ).replace(partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    source = RolloutDataSourceWithBuffer(args)
    generate_rollout(args, 0, source)
    cut = source.buffer[0][0].response_length
    stalled.clear()
    engine.weight_version = "1"
    args = args.replace(over_sampling_batch_size=2)
    second = generate_rollout(args, 1, source)
    resumed = next(s for s in flat(second) if s.group_index == 2)
    assert cut == 2 and resumed.loss_mask == [0] * cut + [1] * (resumed.response_length - cut)


def test_an_abort_by_someone_else_is_made_up_for(tmp_path, fake_engines):
    def script(request):
        if request.number < 2:
            return Reply(text="cut off", finish="abort")
        return Reply(text="whole")

    (engine,) = fake_engines(script)
    args = rollout_args(tmp_path)
    output = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert {(s.response, s.status) for s in flat(output)} == {("whole", Status.COMPLETED)}
    assert len(engine.requests) == 6


def test_progress_is_visible_while_a_rollout_runs(tmp_path, fake_engines):
    """Each group is answered when the engine's thread can see that all before it are kept."""
    seen = {}

    def is_seen(number):
        now = progress.current()
        if now.rollout_id == 2 and not now.finished and now.kept_groups == number:
            seen.setdefault(number, now.generated_samples)
        return number in seen

    fake_engines(lambda r: Reply(text="abc", until=lambda: is_seen(int(r.prompt[0]))))
    progress = RolloutContext.current().progress
    args = rollout_args(tmp_path, rollout_batch_size=5)
    generate_rollout(args, 2, RolloutDataSourceWithBuffer(args))
    assert seen == {number: 2 * number for number in range(5)}
    last = progress.current()
    assert (last.kept_groups, last.generated_samples, last.finished) == (5, 10, True)
    assert last.response_tokens == 10 * len("abc$")
