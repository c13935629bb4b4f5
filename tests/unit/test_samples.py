"""Samples that start anew, that failed, and groups that are worth training on."""

from __future__ import annotations

import numpy as np

from slime.core.types import Sample, Status
from slime.rollout.filter_hub.buffer_filters import pop_first
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.samples import clone_group, fill_empty_response, mark_failed, restart
from tests.args import make_args


def generated() -> Sample:
    return Sample(
        index=3,
        group_index=1,
        prompt="1+1=",
        label="2",
        tokens=[5, 9, 5, 6, 0],
        response="2",
        response_length=2,
        loss_mask=[1, 0],
        rollout_log_probs=[-0.5, -0.1],
        teacher_log_probs=[-0.4, -0.2],
        weight_versions=[4, 4],
        reward=1.0,
        status=Status.ABORTED,
        rollout_routed_experts=np.zeros((4, 1, 2), np.int16),
        metadata={"row": 7},
    )


def test_a_restarted_sample_is_as_before_its_response():
    sample = generated()
    fresh = restart(sample)
    asked = Sample(
        index=3, group_index=1, prompt="1+1=", label="2", tokens=[5, 9, 5], metadata={"row": 7}
    )
    assert fresh == asked
    assert sample.response_length == 2 and sample.rollout_log_probs == [-0.5, -0.1]


def test_copies_share_nothing_that_changes():
    (copy,) = clone_group([sample := generated()])
    copy.tokens.append(1)
    copy.rollout_log_probs.append(-1.0)
    copy.metadata["row"] = 8
    assert sample.tokens == [5, 9, 5, 6, 0] and sample.metadata == {"row": 7}
    assert sample.rollout_log_probs == [-0.5, -0.1]


def test_a_failed_sample_has_no_weight_and_no_reward():
    sample = generated()
    mark_failed(sample, "reward", ValueError("no number"))
    assert (sample.status, sample.reward, sample.remove_sample) == (Status.FAILED, 0.0, True)
    assert sample.metadata["error"] == "ValueError: no number"
    assert sample.metadata["error_stage"] == "reward"


def test_a_token_in_place_of_a_response_is_not_trained_on():
    for prompt in ([5, 9], []):
        sample = Sample(tokens=list(prompt))
        fill_empty_response(sample, 0)
        assert sample.tokens == [*(prompt or [0]), 0]
        assert sample.response_length == 1 and sample.loss_mask == [0]


def scored(*rewards, **fields) -> list[Sample]:
    return [Sample(reward=reward, status=Status.COMPLETED, **fields) for reward in rewards]


def test_a_group_is_kept_when_its_rewards_differ():
    args = make_args()
    assert check_reward_nonzero_std(args, scored(0.0, 1.0, 0.0)).keep
    dropped = check_reward_nonzero_std(args, scored(1.0, 1.0))
    assert (dropped.keep, dropped.reason) == (False, "zero_std_1")
    failed = Sample(reward=0.0, status=Status.FAILED)
    assert not check_reward_nonzero_std(args, [*scored(1.0, 1.0), failed]).keep
    assert not check_reward_nonzero_std(args, [failed]).keep
    keyed = scored({"score": 1.0, "length": 3.0}, {"score": 1.0, "length": 4.0})
    assert not check_reward_nonzero_std(make_args(reward_key="score"), keyed).keep
    assert check_reward_nonzero_std(make_args(reward_key="length"), keyed).keep


def test_the_oldest_of_the_buffer_come_first_and_leave_it():
    buffer = [[Sample(index=i)] for i in range(5)]
    taken = pop_first(make_args(), 0, buffer, 2)
    assert [group[0].index for group in taken] == [0, 1]
    assert [group[0].index for group in buffer] == [2, 3, 4]
    assert len(pop_first(make_args(), 0, buffer, 9)) == 3 and buffer == []


def test_a_failed_sample_without_response_keeps_no_images():
    """Its cut prompt has no placeholders for them."""
    sample = Sample(prompt="p", tokens=[1, 2, 3], multimodal_inputs={"images": [b"x"]})
    mark_failed(sample, "generate", ValueError("no engine"))
    fill_empty_response(sample, 0)
    assert sample.tokens == [1, 0] and sample.image_files == []
    kept = Sample(prompt="p", tokens=[1, 2, 3], multimodal_inputs={"images": [b"x"]})
    kept.status = Status.TRUNCATED
    fill_empty_response(kept, 0)
    assert kept.tokens == [1, 2, 3, 0] and kept.image_files == [b"x"]
