"""Samples as rows for people to read."""

from __future__ import annotations

import json

from slime.core.types import RolloutBatch, Sample, Status
from slime.runlog.sample_log import SampleRow


def batch_rows(samples: list[Sample], batch: RolloutBatch) -> list[SampleRow]:
    """The rows of a batch; the advantage is the normalised reward the trainer starts from."""
    by_index = {sample.index: sample for sample in samples}
    columns = (batch.sample_indices, batch.raw_rewards, batch.rewards)
    return [
        _row(by_index[index], reward=raw, advantage=advantage)
        for index, raw, advantage in zip(*(column.tolist() for column in columns), strict=True)
    ]


def sample_row(sample: Sample, reward_key: str | None, *, kind: str) -> SampleRow:
    """A sample that was scored but not trained on."""
    failed = sample.status is Status.FAILED or sample.reward is None
    return _row(sample, reward=None if failed else sample.get_reward_value(reward_key), kind=kind)


def _row(
    sample: Sample, *, reward: float | None, advantage: float | None = None, kind: str = "train"
) -> SampleRow:
    return SampleRow(
        prompt=sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt),
        response=sample.response,
        reward=reward,
        advantage=advantage,
        status=sample.status.value,
        group_index=sample.group_index,
        index=sample.index,
        prompt_length=len(sample.tokens) - sample.response_length,
        response_length=sample.response_length,
        label=None if sample.label is None else str(sample.label),
        kind=kind,
    )
