"""Which samples of a rollout are kept for people to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.runlog.sample_log import (
    MAX_TEXT_CHARS,
    SampleRow,
    append_samples,
    choose_rows,
    evenly,
    read_samples,
)
from tests.synthetic_run import make_row


def make_groups(num_groups: int, size: int) -> list[SampleRow]:
    """Sample k of every group has reward k."""
    return [
        make_row(g, g * size + k, reward=float(k)) for g in range(num_groups) for k in range(size)
    ]


@pytest.mark.parametrize(("num_groups", "size"), [(16, 8), (5, 3), (100, 1), (1, 64), (3, 2)])
def test_bounded_in_order_and_without_repeats(num_groups: int, size: int):
    chosen = choose_rows(make_groups(num_groups, size), 8)
    assert len(chosen) <= 8
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 8 or num_groups * size < 8 or size < 8


def test_groups_show_the_best_and_the_worst_sample():
    rows = make_groups(16, 8)
    by_group: dict[int, list[float]] = {}
    for number in choose_rows(rows, 8):
        row = rows[number]
        by_group.setdefault(row.group_index, []).append(row.reward)  # type: ignore[arg-type]
    assert len(by_group) == 4
    assert {0, 15} <= set(by_group)  # the first group of the batch and the last
    assert all(sorted(rewards) == [0.0, 7.0] for rewards in by_group.values())


def test_samples_without_reward_are_kept_too():
    rows = [make_row(0, k, reward=None) for k in range(20)]
    assert len(choose_rows(rows, 8)) == 8


def test_written_rows_come_back_and_long_texts_lose_their_middle(tmp_path: Path):
    text = "a" * MAX_TEXT_CHARS + "b" * 1000 + "c" * MAX_TEXT_CHARS
    append_samples(
        tmp_path, 7, [make_row(1, 2, reward=0.5, response=text, label="42", status="truncated")]
    )
    [(rollout_id, row)] = read_samples(tmp_path)
    assert (rollout_id, row.index, row.reward, row.label) == (7, 2, 0.5, "42")
    assert len(row.response) < MAX_TEXT_CHARS + 100
    assert row.response.startswith("a" * 100) and row.response.endswith("c" * 100)
    assert f"{len(text) - MAX_TEXT_CHARS:,} characters left out" in row.response


def test_evenly_takes_both_ends():
    assert evenly(list(range(10)), 4) == [0, 3, 6, 9]
    assert evenly([1, 2], 5) == [1, 2]
    assert evenly([1, 2, 3], 1) == [1]
