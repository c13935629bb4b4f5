"""A few samples of every rollout in samples.jsonl, for people to read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from slime.core.types import RolloutBatch, Sample, Status
from slime.runlog.jsonl import append_lines, read_lines

SAMPLES_FILE = "samples.jsonl"
SAMPLES_PER_ROLLOUT = 8
MAX_TEXT_CHARS = 8000


@dataclass(kw_only=True, frozen=True)
class SampleRow:
    """One sample as shown to people: text, reward and advantage.

    `advantage` is the reward after normalisation within the group, or None (eval, SFT).
    """

    prompt: str
    response: str
    reward: float | None
    advantage: float | None
    status: str
    group_index: int | None
    index: int | None
    prompt_length: int
    response_length: int
    label: str | None = None
    kind: str = "train"  # "train", or "eval/<dataset>"


def append_samples(
    run_dir: str | Path,
    rollout_id: int,
    rows: Sequence[SampleRow],
    *,
    limit: int = SAMPLES_PER_ROLLOUT,
) -> None:
    """Append at most `limit` of the rows, spread evenly over the groups; long texts are shortened."""
    records = [{"rollout_id": rollout_id, **_record(rows[i])} for i in choose_rows(rows, limit)]
    append_lines(Path(run_dir) / SAMPLES_FILE, records)


def read_samples(run_dir: str | Path) -> list[tuple[int, SampleRow]]:
    """Return (rollout_id, row) for every valid line of samples.jsonl."""
    read = (_read(record) for record in read_lines(Path(run_dir) / SAMPLES_FILE))
    return [row for row in read if row is not None]


def _read(record: dict[str, Any]) -> tuple[int, SampleRow] | None:
    types = get_type_hints(SampleRow)
    rollout_id = record.get("rollout_id")
    values = {name: value for name, value in record.items() if name in types}
    needed = {f.name for f in fields(SampleRow) if f.default is MISSING}
    if not isinstance(rollout_id, int) or not needed <= values.keys():
        return None
    if not all(_has_type(value, types[name]) for name, value in values.items()):
        return None
    return rollout_id, SampleRow(**values)


def _has_type(value: object, wanted: Any) -> bool:
    kinds = get_args(wanted) or (wanted,)
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def choose_rows(rows: Sequence[SampleRow], limit: int) -> list[int]:
    """Return row numbers in order: groups picked evenly over the batch, at least two samples of each.

    Samples of one group side by side show what the advantage rewards. 6 groups of 4 with limit 8
    give 4 groups, two rows of each: the best and the worst of the group.
    """
    groups: dict[int | None, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group_index, []).append(number)
    if len(rows) <= limit:
        return list(range(len(rows)))
    per_group = 2 if max(len(members) for members in groups.values()) > 1 else 1
    names = list(groups)
    picked = evenly(names, max(1, limit // per_group))
    per_group = max(per_group, limit // len(picked))
    chosen = [number for name in picked for number in _spread(groups[name], rows, per_group)]
    return sorted(chosen[:limit])


def evenly(items: list, count: int) -> list:
    """Return `count` items at equal distances, first and last included; all if there are fewer."""
    if count >= len(items):
        return items
    if count == 1:
        return items[:1]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _spread(members: list[int], rows: Sequence[SampleRow], count: int) -> list[int]:
    """Return `count` of the group's rows, evenly from the best reward to the worst."""
    rewards = {n: rows[n].reward for n in members}
    ranked = sorted(members, key=lambda n: -math.inf if (r := rewards[n]) is None else -r)
    return evenly(ranked, count)


def _record(row: SampleRow) -> dict[str, object]:
    record = asdict(row)
    record["prompt"] = _shorten(row.prompt)
    record["response"] = _shorten(row.response)
    return record


def _shorten(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out:,} characters left out ...]\n{text[-half:]}"


def batch_rows(samples: list[Sample], batch: RolloutBatch) -> list[SampleRow]:
    """Return the rows of a batch; the advantage is the normalised reward that the trainer gets."""
    by_index = {sample.index: sample for sample in samples}
    columns = (batch.sample_indices, batch.raw_rewards, batch.rewards)
    return [
        _row(by_index[index], reward=raw, advantage=advantage)
        for index, raw, advantage in zip(*(column.tolist() for column in columns), strict=True)
    ]


def sample_row(sample: Sample, reward_key: str | None, *, kind: str) -> SampleRow:
    """Return the row of a sample that was scored but not trained on."""
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
