import pickle

import numpy as np
import pytest

from slime.core.types import MetricSum, RolloutBatch, Sample, Schedule
from tests.batches import random_batch


def two_rows(**changes):
    """The worked example of RolloutBatch's docstring."""
    columns = {
        "tokens": [[5, 9, 5, 7, 6, 0], [7, 8, 1, 9, 0]],
        "response_lens": [2, 4],
        "loss_masks": [[1, 1], [1, 1, 1, 1]],
        "rewards": [0.7, -0.7],
        "raw_rewards": [1.0, 0.0],
        "truncated": [0, 0],
        "group_indices": [0, 0],
        "sample_indices": [0, 1],
        "trajectory_ids": [0, 1],
    }
    return RolloutBatch(**{**columns, **changes})


def test_columns_get_their_dtypes():
    batch = two_rows(rollout_log_probs=[[-1, -2], [-1, -2, -3, -4]])
    assert batch.tokens[0].dtype == np.int32
    assert batch.response_lens.dtype == np.int32
    assert batch.loss_masks[1].dtype == np.int8
    assert batch.rollout_log_probs[0].dtype == np.float32
    assert batch.total_lens == [6, 5] and len(batch) == 2


def test_no_column_loses_what_a_row_may_hold():
    """Weights of 1e-6 and less, ids of long runs, the last of many experts and of a large vocabulary."""
    fine = [[1.2345678e-6, -7.654321], [0.1, 0.2, 0.3, 1e-9]]
    names = ["loss_weights", "rollout_log_probs", "teacher_log_probs", "old_log_probs"]
    names += ["ref_log_probs", "values", "advantages", "returns"]
    experts = [np.full((6, 1, 2), 511), np.full((5, 1, 2), -1)]
    batch = two_rows(
        **dict.fromkeys(names, fine),
        tokens=[[5, 9, 5, 7, 6, 262_143], [7, 8, 1, 9, 0]],
        rewards=[0.7654321, -0.7],
        raw_rewards=[0.1, 2.5],
        group_indices=[2**40, 0],
        sample_indices=[2**40, 1],
        trajectory_ids=[2**40, 2],
        routed_experts=experts,
    )
    part = pickle.loads(pickle.dumps(batch.select([1, 0])))
    for name in names:
        for row, values in zip((1, 0), getattr(part, name), strict=True):
            np.testing.assert_array_equal(values, np.array(fine[row], np.float32))
    for name, values in (("rewards", [-0.7, 0.7654321]), ("raw_rewards", [2.5, 0.1])):
        np.testing.assert_array_equal(getattr(part, name), np.array(values, np.float32))
    for name in ("group_indices", "sample_indices", "trajectory_ids"):
        assert getattr(part, name)[1] == 2**40
    assert part.tokens[1][-1] == 262_143
    np.testing.assert_array_equal(part.routed_experts[1], experts[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [1.0]}, "rewards has 1 rows, tokens has 2"),
        ({"loss_masks": [[1, 1], [1, 1, 1]]}, "row 1: loss_masks has 3 entries for 4"),
        ({"old_log_probs": [[0.0], [0.0] * 4]}, "row 0: old_log_probs has 1 entries for 2"),
        ({"values": [[0.0] * 3, [0.0] * 4]}, "row 0: values has 3 entries for 2"),
        (
            {"routed_experts": [np.zeros((6, 1, 2)), np.zeros((4, 1, 2))]},
            "row 1: routed_experts has 4 entries for 5 tok",
        ),
        (
            {"response_lens": [6, 4], "loss_masks": [[1] * 6, [1] * 4]},
            "row 0: 6 response tokens of 6",
        ),
        ({"response_lens": [0, 4], "loss_masks": [[], [1] * 4]}, "row 0: 0 response tokens of 6"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        two_rows(**changes)


def test_select_takes_rows_of_every_column():
    batch = random_batch(5, metadata=[{"row": row} for row in range(5)])
    schedule = Schedule(steps=[[[0], [1]]], log_prob_micro_batches=[[0, 1]])
    part = batch.select([3, 1], schedule)
    assert part.schedule is schedule and len(part) == 2
    for here, there in ((0, 3), (1, 1)):
        assert part.sample_indices[here] == batch.sample_indices[there]
        assert part.metadata[here] == {"row": there}
        np.testing.assert_array_equal(part.tokens[here], batch.tokens[there])
        np.testing.assert_array_equal(part.advantages[here], batch.advantages[there])
    assert part.values is None


def test_pickle_keeps_the_batch_and_costs_little_per_row():
    batch = random_batch(300)
    data = pickle.dumps(batch)
    back = pickle.loads(data)
    for name in ("tokens", "loss_masks", "old_log_probs"):
        for a, b in zip(getattr(batch, name), getattr(back, name), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(back.rewards, batch.rewards)
    # 4 bytes per token of each filled column, 8 per row and ragged column for the lengths
    payload = 4 * sum(batch.total_lens) + int(batch.response_lens.sum()) * (1 + 4 * 5)
    per_row = 7 * 8 + 4 * 3 + 8 * 7
    assert len(data) < payload + 300 * per_row + 4000


def test_append_response_tokens_keeps_columns_aligned():
    sample = Sample(tokens=[5, 9])
    sample.append_response_tokens(tokens=[6, 7], log_probs=[-0.5, -0.1], weight_versions=[3, 3])
    sample.append_response_tokens(tokens=[1, 2, 3], trainable=False)
    sample.append_response_tokens(tokens=[4], log_probs=[-0.2], weight_versions=[4])
    assert sample.tokens == [5, 9, 6, 7, 1, 2, 3, 4]
    assert sample.response_length == 6
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.1, 0.0, 0.0, 0.0, -0.2]
    assert sample.weight_versions == [3, 3, 3, 3, 3, 4]


def test_append_response_tokens_refuses_what_does_not_align():
    sample = Sample(tokens=[5])
    with pytest.raises(ValueError, match="2 tokens but 1 log_probs"):
        sample.append_response_tokens(tokens=[6, 7], log_probs=[-0.5])
    with pytest.raises(ValueError, match="log-probs"):
        sample.append_response_tokens(tokens=[6, 7])
    assert sample.tokens == [5] and sample.response_length == 0


def test_reward_value():
    assert Sample(reward=0.5).get_reward_value(None) == 0.5
    assert Sample(reward={"score": 1, "acc": True}).get_reward_value("score") == 1.0
    with pytest.raises(KeyError, match="--reward-key is None"):
        Sample(reward={"score": 1}).get_reward_value(None)
    with pytest.raises(ValueError, match="sample 7 has no reward"):
        Sample(index=7).get_reward_value(None)


def test_sample_survives_its_dictionary():
    sample = Sample(index=3, prompt="1+1=", status=Sample.Status.TRUNCATED, metadata={"a": 1})
    assert Sample.from_dict(sample.to_dict()) == sample
    assert sample.to_dict()["status"] == "truncated"


def test_metric_sums_add_up_to_the_mean_over_everything():
    assert (MetricSum(total=6, count=3) + MetricSum(total=2, count=1)).mean == 8 / 4
    assert MetricSum(total=0, count=0).mean == 0.0
