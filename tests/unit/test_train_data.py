"""Samples to rows: rewards by group, masks, and a split that loses nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.rollout.samples import fill_empty_response
from slime.rollout.train_data import samples_to_batch, split_batch
from tests.args import make_args


def sample(index: int, group: int, reward: float, length: int = 3, **fields) -> Sample:
    defaults = {
        "index": index,
        "group_index": group,
        "reward": reward,
        "tokens": list(range(2 + length)),
        "response_length": length,
        "rollout_log_probs": [-0.5] * length,
        "status": Status.COMPLETED,
    }
    return Sample(**{**defaults, **fields})


def test_rewards_are_normalised_within_uneven_groups():
    rewards = {0: [1.0, 0.0, 0.5], 1: [2.0, 1.0]}
    samples = [sample(10 * g + i, g, r) for g, rs in rewards.items() for i, r in enumerate(rs)]
    batch = samples_to_batch(make_args(), samples)
    expected = [
        (r - np.mean(rs)) / (np.std(rs, ddof=1) + 1e-6) for rs in rewards.values() for r in rs
    ]
    np.testing.assert_allclose(batch.rewards, expected, rtol=1e-5)
    np.testing.assert_array_equal(batch.raw_rewards, [r for rs in rewards.values() for r in rs])


def test_overlong_answers_lose_reward_before_normalisation():
    args = make_args(rollout_max_response_len=8, overlong_buffer_len=4, overlong_penalty_factor=2.0)
    batch = samples_to_batch(args, [sample(0, 0, 1.0, length=3), sample(1, 0, 1.0, length=6)])
    # Tokens 5..8 are punished linearly up to 2: the sixth has covered half of the way.
    np.testing.assert_allclose(batch.raw_rewards, [1.0, 1.0 - 2.0 * 2 / 4])
    assert batch.rewards[0] > 0 > batch.rewards[1]


def test_a_failed_sample_neither_learns_nor_changes_its_group():
    healthy = [sample(0, 0, 1.0), sample(1, 0, 0.0)]
    failed = sample(2, 0, 0.0, status=Status.FAILED, remove_sample=True)
    alone = samples_to_batch(make_args(), healthy)
    batch = samples_to_batch(make_args(), [*healthy, failed])
    np.testing.assert_allclose(batch.rewards[:2], alone.rewards)
    assert batch.rewards[2] == 0
    assert batch.loss_masks[2].sum() == 0


def test_removed_samples_keep_their_row_without_weight():
    batch = samples_to_batch(
        make_args(), [sample(0, 0, 1.0, remove_sample=True), sample(1, 0, 0.0)]
    )
    assert [m.tolist() for m in batch.loss_masks] == [[0, 0, 0], [1, 1, 1]]


def test_log_probs_for_some_samples_only_are_refused():
    with pytest.raises(UserError, match="1 of 2 samples have rollout_log_probs"):
        samples_to_batch(
            make_args(), [sample(0, 0, 1.0), sample(1, 0, 0.0, rollout_log_probs=None)]
        )


def test_only_a_failed_sample_may_lack_the_teachers_log_probs():
    """Zeros in their place would say that the teacher is certain of every token."""
    taught = sample(0, 0, 1.0, teacher_log_probs=[-0.1, -0.2, -0.3])
    with pytest.raises(UserError, match="1 of 2 samples have teacher_log_probs"):
        samples_to_batch(make_args(), [taught, sample(1, 0, 0.0)])


def test_a_batch_in_which_no_row_is_trained_on_may_lack_some():
    removed = sample(0, 0, 1.0, teacher_log_probs=[-0.1, -0.2, -0.3], remove_sample=True)
    batch = samples_to_batch(make_args(), [removed, sample(1, 0, 0.0, remove_sample=True)])
    assert batch.teacher_log_probs is not None
    assert batch.teacher_log_probs[1].tolist() == [0.0, 0.0, 0.0]


def test_experts_of_tokens_that_the_engine_did_not_say_are_free():
    """It says those of every token it has read: all but the last one, which it only wrote."""
    known = np.arange(2 * 4 * 2, dtype=np.int16).reshape(4, 2, 2)
    samples = [sample(i, 0, float(i), rollout_routed_experts=known + i) for i in range(2)]
    args = make_args().replace(use_rollout_routing_replay=True)
    batch = samples_to_batch(args, samples)
    for i, experts in enumerate(batch.routed_experts):
        np.testing.assert_array_equal(experts[:4], known + i)
        np.testing.assert_array_equal(experts[4:], np.full((1, 2, 2), -1))


def reversed_rewards(args, samples):
    raw = [s.reward for s in samples]
    return raw, raw[::-1]


def test_rewards_of_a_hook_are_raw_first_and_then_what_is_trained_on():
    args = make_args(custom_reward_post_process_path=f"{__name__}.reversed_rewards")
    batch = samples_to_batch(args, [sample(i, 0, float(i)) for i in range(3)])
    assert batch.raw_rewards.tolist() == [0.0, 1.0, 2.0]
    assert batch.rewards.tolist() == [2.0, 1.0, 0.0]


def divided_by_zero(args, samples):
    return [1.0, 0.0], [1.0, float("inf")]


@pytest.mark.parametrize(
    ("flags", "rewards", "message"),
    [
        ({}, [1.0, float("nan")], "--rollout-function-path .* returned reward nan for sample 1"),
        (
            {"custom_reward_post_process_path": f"{__name__}.divided_by_zero"},
            [1.0, 0.0],
            "--custom-reward-post-process-path .*divided_by_zero returned reward inf for sample 1",
        ),
    ],
)
def test_a_reward_that_is_not_finite_is_refused_by_name(flags, rewards, message):
    samples = [sample(i, 0, reward) for i, reward in enumerate(rewards)]
    with pytest.raises(UserError, match=message):
        samples_to_batch(make_args(**flags), samples)


def last_two_backwards(args, samples):
    chosen = samples[:-3:-1]
    return {
        "tokens": [s.tokens for s in chosen],
        "response_lengths": [s.response_length for s in chosen],
        "rewards": [0.25, -0.25],
        "raw_reward": [s.reward for s in chosen],
        "truncated": [1, 0],
        "sample_indices": [s.index for s in chosen],
        "loss_masks": [[1, 0, 1], [1, 1, 1]],
        "rollout_log_probs": [[-0.1] * 3, [-0.2] * 3],
        "teacher_log_probs": [[-0.3] * 3, [-0.4] * 3],
        "metadata": [{"a": 1}, None],
    }


def test_rows_of_a_converting_hook_keep_their_order_and_what_it_left_out_comes_from_their_samples():
    args = make_args(custom_convert_samples_to_train_data_path=f"{__name__}.last_two_backwards")
    made = [sample(10 + i, i, float(i), rollout_id=70 + i) for i in range(3)]
    batch = samples_to_batch(args, made)
    assert batch.sample_indices.tolist() == [12, 11]
    assert batch.group_indices.tolist() == [2, 1] and batch.trajectory_ids.tolist() == [72, 71]
    assert batch.rewards.tolist() == [0.25, -0.25] and batch.raw_rewards.tolist() == [2.0, 1.0]
    assert batch.truncated.tolist() == [1, 0]
    assert [mask.tolist() for mask in batch.loss_masks] == [[1, 0, 1], [1, 1, 1]]
    for name, values in (("rollout_log_probs", [-0.1, -0.2]), ("teacher_log_probs", [-0.3, -0.4])):
        rows = getattr(batch, name)
        np.testing.assert_allclose(rows, [[value] * 3 for value in values], rtol=1e-6)
    assert batch.metadata == [{"a": 1}, None]


def test_nothing_to_train_on_is_reported():
    empty = sample(0, 0, 1.0, tokens=[1, 2], response_length=0, rollout_log_probs=[])
    with pytest.raises(UserError, match="no sample"):
        samples_to_batch(make_args(), [empty])


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_split_deals_every_row_once_with_total_weight_one(dp_size):
    args = make_args(rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=8)
    samples = [sample(i, i // 2, float(i % 2), length=1 + i) for i in range(8)]
    parts = split_batch(args, samples_to_batch(args, samples), dp_size=dp_size, cp_size=1)
    assert len(parts) == dp_size
    seen, weight = [], 0.0
    for part in parts:
        for step, micro_batches in enumerate(part.schedule.steps):
            for number, rows in enumerate(micro_batches):
                if (step, number) not in part.schedule.dummies:
                    seen += part.sample_indices[rows].tolist()
                    weight += sum(part.loss_weights[row].sum() for row in rows)
    assert sorted(seen) == list(range(8))
    assert weight == pytest.approx(1.0)


def test_supervised_and_unnormalised_rewards_stay_as_they_are():
    samples = [sample(i, i // 2, float(i * i)) for i in range(4)]
    for flags in ({"disable_rewards_normalization": True}, {"loss_type": "sft_loss"}):
        batch = samples_to_batch(make_args(**flags), samples)
        assert batch.rewards.tolist() == batch.raw_rewards.tolist() == [0.0, 1.0, 4.0, 9.0]


def test_the_reward_of_a_dictionary_is_that_of_the_key():
    samples = [sample(i, 0, {"score": float(i), "length": 7.0}) for i in range(3)]
    batch = samples_to_batch(make_args(reward_key="score"), samples)
    assert batch.raw_rewards.tolist() == [0.0, 1.0, 2.0]
    np.testing.assert_allclose(batch.rewards, [-1 / (1 + 1e-6), 0, 1 / (1 + 1e-6)], rtol=1e-5)


def test_rows_know_their_group_execution_and_ending():
    """Two samples of one execution, which a generate function made; the others are their own."""
    samples = [
        sample(5, 1, 0.0, rollout_id=40),
        sample(6, 1, 1.0, rollout_id=40, status=Status.TRUNCATED),
        sample(8, 2, 0.0),
    ]
    batch = samples_to_batch(make_args(), samples)
    assert batch.trajectory_ids.tolist() == [40, 40, 8]
    assert batch.group_indices.tolist() == [1, 1, 2]
    assert batch.sample_indices.tolist() == [5, 6, 8]
    assert batch.truncated.tolist() == [0, 1, 0]


LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8]  # of eight responses behind prompts of two tokens


def split_whole(cp_size: int = 1, dp_size: int = 1, **flags):
    args = make_args(rollout_batch_size=4, n_samples_per_prompt=2, global_batch_size=4, **flags)
    samples = [sample(i, i // 2, float(i % 2), length=n) for i, n in enumerate(LENGTHS)]
    batch = samples_to_batch(args, samples)
    return split_batch(args, batch, dp_size=dp_size, cp_size=cp_size)


@pytest.mark.parametrize("per_token", [False, True])
def test_weights_are_those_of_steps_of_the_global_batch(per_token):
    """Four executions a step: 1/(4 n) for each of n tokens, or 1/10 and 1/26 for all of a step's."""
    (part,) = split_whole(calculate_per_token_loss=per_token)
    assert [sorted(r for mb in step for r in mb) for step in part.schedule.steps] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    for row, n in enumerate(LENGTHS):
        weight = 1 / sum(LENGTHS[:4] if row < 4 else LENGTHS[4:]) if per_token else 1 / (4 * n)
        np.testing.assert_allclose(part.loss_weights[row], [weight] * n, rtol=1e-6)


def test_flags_choose_how_rows_are_packed():
    """Rows of 3 to 10 tokens in steps of four; dealt in order unless balanced."""

    def packed(**options):
        (part,) = split_whole(**options)
        return part.schedule.steps, part.schedule.log_prob_micro_batches

    pairs = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    # Without --use-dynamic-batch-size budgets of tokens do nothing, in neither pass.
    assert packed(micro_batch_size=2, max_tokens_per_gpu=99) == (pairs, pairs[0] + pairs[1])
    budget = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 18}
    steps, forward = packed(**budget, log_probs_max_tokens_per_gpu=52)
    assert steps == [[[0, 1, 2, 3]], [[4, 5], [6], [7]]]  # 3+4+5+6; 7+8, 9, 10
    assert forward == [list(range(8))]  # 52 in all
    assert packed(**budget)[1] == [[0, 1, 2, 3], [4, 5], [6], [7]]
    # Two context ranks, rows padded to 4 8 8 8 and 8 8 12 12: 36 tokens a micro-batch.
    assert packed(**budget, cp_size=2)[0] == [[[0, 1, 2, 3]], [[4, 5, 6], [7]]]
    assert packed(**budget, balance_data=True)[0][1] == [[4, 7], [5, 6]]  # 7+10, 8+9


def test_a_failed_sample_does_not_decide_whether_rows_have_log_probs():
    """A generate function may leave the log-probs out; the token in place of a failed response has 0."""
    plain = Sample(index=0, group_index=0, tokens=[5, 6], response_length=1, reward=1.0)
    failed = Sample(index=1, group_index=0, tokens=[5, 9], reward=0.0, remove_sample=True)
    fill_empty_response(failed, 0)
    args = make_args(rollout_batch_size=1, n_samples_per_prompt=2)
    assert samples_to_batch(args, [plain, failed]).rollout_log_probs is None
    recorded = replace(plain, rollout_log_probs=[-0.5])
    unfilled = Sample(index=1, group_index=0, tokens=[5, 9], reward=0.0)
    columns = samples_to_batch(args, [recorded, unfilled]).rollout_log_probs
    assert [column.tolist() for column in columns] == [[-0.5], [0.0]]
    with pytest.raises(UserError, match="1 of 2 samples have rollout_log_probs"):
        samples_to_batch(args, [recorded, replace(plain, index=1)])


def test_rows_of_a_converting_hook_have_the_routing_of_their_samples():
    hook = f"{__name__}.last_two_backwards"
    args = make_args(
        custom_convert_samples_to_train_data_path=hook,
        train_backend="megatron",
        use_rollout_routing_replay=True,
    )
    routed = [np.full((6, 2, 1), number, np.int16) for number in range(3)]
    made = [
        sample(10 + i, i, float(i), rollout_routed_experts=experts)
        for i, experts in enumerate(routed)
    ]
    batch = samples_to_batch(args, made)
    assert batch.routed_experts is not None
    assert [int(row.max()) for row in batch.routed_experts] == [2, 1]


def test_a_sample_without_trained_tokens_needs_no_routing():
    """A failed one, and one whose prompt filled the context; the others keep theirs."""
    args = make_args().replace(use_rollout_routing_replay=True)
    known = np.ones((4, 2, 3), np.int16)
    failed = sample(1, 0, 0.0, 0, tokens=[5, 6], status=Status.FAILED, rollout_log_probs=None)
    full = sample(2, 0, 0.0, 0, tokens=[5, 6, 7], status=Status.TRUNCATED, rollout_log_probs=None)
    samples = [failed, sample(0, 0, 1.0, rollout_routed_experts=known), full]
    batch = samples_to_batch(args, samples)
    first, second, third = batch.routed_experts
    assert [len(row) for row in batch.routed_experts] == [len(row) for row in batch.tokens]
    assert (first == -1).all() and (third == -1).all() and first.shape[1:] == (2, 3)
    assert second.shape == (5, 2, 3) and (second[:4] == 1).all()
    with pytest.raises(UserError, match="sample 3 has no routed experts"):
        samples_to_batch(args, [*samples, sample(3, 0, 1.0)])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_replayed_samples_may_have_tokens_of_any_sequence_type(kind):
    """A generate function may set an array or a tensor."""
    args = make_args().replace(use_rollout_routing_replay=True)
    experts = np.ones((4, 2, 1), np.int16)
    made = sample(0, 0, 1.0, tokens=kind([5, 6, 7, 8, 9]), rollout_routed_experts=experts)
    (column,) = samples_to_batch(args, [made]).routed_experts
    assert column[:, 0, 0].tolist() == [1, 1, 1, 1, -1]


@pytest.mark.parametrize("hook", ["shortened", "other_tokens"])
def test_a_converting_hook_may_change_the_end_of_replayed_rows_only(hook):
    args = make_args(
        custom_convert_samples_to_train_data_path=f"{__name__}.{hook}",
        train_backend="megatron",
        use_rollout_routing_replay=True,
    )
    made = [sample(0, 0, 1.0, rollout_routed_experts=np.ones((4, 2, 1), np.int16))]
    if hook == "other_tokens":
        with pytest.raises(
            UserError, match=r"--custom-convert.* returned other tokens for sample 0"
        ):
            samples_to_batch(args, made)
        return
    (experts,) = samples_to_batch(args, made).routed_experts
    np.testing.assert_array_equal(experts, np.ones((4, 2, 1)))


def shortened(args, samples: list[Sample]) -> dict:
    return _converted(samples, [s.tokens[:-1] for s in samples])


def other_tokens(args, samples: list[Sample]) -> dict:
    return _converted(samples, [s.tokens[1:] for s in samples])


def _converted(samples: list[Sample], tokens: list[list[int]]) -> dict:
    return {
        "tokens": tokens,
        "response_lengths": [2 for _ in samples],
        "rewards": [1.0 for _ in samples],
        "raw_reward": [1.0 for _ in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": [s.index for s in samples],
        "loss_masks": [[1, 1] for _ in samples],
        "rollout_log_probs": [[-0.5, -0.5] for _ in samples],
    }
