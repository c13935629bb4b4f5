"""What people read about samples is what was trained on, sample by sample."""

from __future__ import annotations

import json

from slime.core.types import Sample, Status
from slime.rollout.train_data import samples_to_batch
from slime.runlog.sample_log import append_samples, batch_rows, read_samples, sample_row
from tests.args import make_args


def sample(index: int, **fields) -> Sample:
    values = {
        "index": index,
        "group_index": 0,
        "prompt": f"prompt {index}",
        "response": f"response {index}",
        "label": index,
        "reward": float(index),
        "tokens": list(range(3 + index)),
        "response_length": 1 + index,
        "rollout_log_probs": [-0.5] * (1 + index),
        "status": Status.COMPLETED,
    }
    return Sample(**{**values, **fields})


def test_rows_of_a_batch_show_reward_and_advantage_of_their_own_sample():
    samples = [sample(4), sample(2), sample(3)]
    args = make_args(advantage_estimator="reinforce_plus_plus_baseline")
    rows = batch_rows(samples, samples_to_batch(args, samples).select([2, 0, 1]))
    assert [row.index for row in rows] == [3, 4, 2]
    assert [row.response for row in rows] == ["response 3", "response 4", "response 2"]
    assert [row.reward for row in rows] == [3.0, 4.0, 2.0]
    assert [row.advantage for row in rows] == [0.0, 1.0, -1.0]  # against the mean of 3
    assert [(row.prompt_length, row.response_length) for row in rows] == [(2, 4), (2, 5), (2, 3)]
    assert [row.label for row in rows] == ["3", "4", "2"]


def test_a_sample_that_failed_shows_no_reward():
    """Its 0 was never earned."""
    failed = sample(1, reward=0.0, status=Status.FAILED)
    assert sample_row(failed, 0.0, kind="eval/x").reward is None
    row = sample_row(sample(1, reward={"score": 0.5}), 0.5, kind="eval/x")
    assert (row.reward, row.advantage, row.kind) == (0.5, None, "eval/x")
    assert row.rewards == {"score": 0.5}


def test_every_reason_of_a_failure_is_kept(tmp_path):
    """Beside the evenly chosen rows, which may all be of samples that did not fail."""
    samples = [sample(n, group_index=n // 4) for n in range(64)]
    for n, error in ((17, "KeyError: 'a'"), (18, "KeyError: 'a'"), (42, "ValueError: b")):
        samples[n].status = Status.FAILED
        samples[n].metadata = {"error": error, "error_stage": "reward", "error_traceback": "t"}
    rows = [sample_row(one, 1.0, kind="train") for one in samples]
    append_samples(tmp_path, 0, rows, limit=4)
    kept = {row.error: row.index for _, row in read_samples(tmp_path) if row.error}
    assert kept == {"reward: KeyError: 'a'\nt": 17, "reward: ValueError: b\nt": 42}


def test_prompts_of_messages_are_shown_and_no_label_is_none():
    messages = [{"role": "user", "content": "1+1="}]
    row = sample_row(sample(1, prompt=messages, label=None), None, kind="eval/x")
    assert json.loads(row.prompt) == messages and row.label is None
    assert sample_row(sample(1), None, kind="eval/x").prompt == "prompt 1"
