"""What the page says about a run: its state, and each statement about a reward that does not rise."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest

from slime.runlog.event_log import EventLog
from slime.runlog.jsonl import append_lines
from slime.runlog.live.findings import findings
from slime.runlog.live.metric_store import MetricStore, thinned
from slime.runlog.live.run_view import RunView, is_lock_of
from slime.runlog.live.sample_store import SampleStore
from slime.runlog.recorder import LearningWarnings
from slime.runlog.sample_log import append_samples
from tests.synthetic_run import make_row

HEALTHY = {
    "rollout/reward_mean": 0.5,
    "rollout/samples": 8.0,
    "rollout/failed": 0.0,
    "rollout/truncated": 0.0,
    "rollout/response_len_mean": 10.0,
    "train/entropy": 0.8,
    "train/grad_norm": 0.4,
    "train/clip_fraction": 0.01,
    "train/log_prob_gap_mean": 1e-6,
    "train/lr": 1e-5,
}


def write_metrics(folder: Path, rollouts: int = 30, **columns) -> None:
    """Healthy numbers, except for the named columns: a function of the rollout each."""
    records = []
    for r in range(rollouts):
        values = {**HEALTHY, **{name.replace("__", "/"): fn(r) for name, fn in columns.items()}}
        records.append({"rollout_id": r, "kind": "train", "time": 1e9 + r, **values})
    append_lines(folder / "metrics.jsonl", records)


def statement(folder: Path, metric: str, config: dict | None = None) -> dict:
    """The statement that has this metric first."""
    metrics, samples = MetricStore(folder), SampleStore(folder)
    metrics.update()
    samples.update()
    found = findings(metrics, samples, config or {})
    (wanted,) = [finding for finding in found if finding["metrics"][:1] == [metric]]
    return wanted


@pytest.mark.parametrize(
    ("metric", "column", "level", "words"),
    [
        ("rollout/reward_mean", lambda r: 0.1 + 0.02 * r, "fine", "rises"),
        ("rollout/reward_mean", lambda r: 0.5 + 0.1 * (r % 2), "problem", "does not move"),
        ("rollout/reward_mean", lambda r: 0.9 - 0.02 * r, "problem", "falls"),
        ("rollout/truncated", lambda r: 0.05, "fine", "5.0 %"),
        ("rollout/truncated", lambda r: 0.4, "problem", "40 %"),
        ("rollout/truncated", lambda r: 0.4 if r < 20 else 0.0, "fine", "0 %"),  # long ago
        ("rollout/failed", lambda r: 0.0, "fine", "No sample"),
        ("rollout/failed", lambda r: 2.0, "problem", "25 %"),
        ("train/entropy", lambda r: 0.8 * 0.8**r, "problem", "collapsed"),
        ("train/entropy", lambda r: 0.8 + 0.2 * r, "notice", "grows"),
        ("train/grad_norm", lambda r: 0.0, "problem", "zero"),
        ("train/grad_norm", lambda r: None if r == 25 else 1.0, "problem", "not a number"),
        ("train/clip_fraction", lambda r: 0.5, "problem", "50 %"),
        ("train/log_prob_gap_mean", lambda r: 0.3, "problem", "0.3"),
        ("train/lr", lambda r: 1e-5 * (1 - r / 29), "notice", "nearly zero"),
        ("rollout/response_len_mean", lambda r: 10.0 if r < 15 else 100.0, "notice", "longer"),
    ],
)
def test_a_statement_follows_the_latest_rollouts(tmp_path, metric, column, level, words):
    write_metrics(tmp_path, **{metric.replace("/", "__"): column})
    found = statement(tmp_path, metric)
    assert found["level"] == level and words in found["title"]


def test_a_gap_of_stale_samples_is_not_taken_for_a_defect(tmp_path):
    gap = {"train__stale_log_prob_gap_mean": lambda r: 0.3}
    write_metrics(tmp_path, **gap, rollout__staleness_mean=lambda r: 1.0)
    found = statement(tmp_path, "train/stale_log_prob_gap_mean")
    assert found["level"] == "fine" and "1 weight updates old" in found["text"]


def test_nothing_is_concluded_from_nothing(tmp_path):
    assert findings(MetricStore(tmp_path), SampleStore(tmp_path), {}) == []


def write_groups(folder: Path, rewards: list[list[float]], rollout_id: int = 29) -> None:
    rows = [
        make_row(group, group * 10 + place, reward=reward)
        for group, members in enumerate(rewards)
        for place, reward in enumerate(members)
    ]
    append_samples(folder, rollout_id, rows)


@pytest.mark.parametrize(
    ("rewards", "level", "words"),
    [
        ([[0, 1], [1, 0], [0, 1], [1, 1]], "fine", "1 of 4 groups"),
        ([[0, 0], [0, 0], [0, 0], [0, 1]], "problem", "too hard"),
        ([[1, 1], [1, 1], [1, 1], [0, 1]], "notice", "solved"),
    ],
)
def test_groups_with_equal_rewards_are_counted(tmp_path, rewards, level, words):
    write_metrics(tmp_path)
    write_groups(tmp_path, [[0, 0]] * 50, rollout_id=3)  # long ago
    write_groups(tmp_path, rewards)
    found = statement(tmp_path, "rollout/zero_std_groups")
    equal = sum(len(set(group)) == 1 for group in rewards)
    assert f"{equal} of {len(rewards)} groups since rollout 20" in found["text"]
    assert found["level"] == level and words in found["text"]
    assert found["query"] == {"signal": "none", "dataset": "train", "rollout_id_min": "20"}


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_constant_reward_teaches_nothing(tmp_path, reward):
    write_metrics(tmp_path)
    write_groups(tmp_path, [[reward, reward]] * 4)
    found = statement(tmp_path, "rollout/zero_std_groups")
    assert found["level"] == "problem" and found["title"] == "All rewards are equal"
    assert f"Each of 8 samples since rollout 20 has the reward {reward:.3f}" in found["text"]


def test_estimators_without_groups_learn_from_equal_ones(tmp_path):
    write_metrics(tmp_path)
    write_groups(tmp_path, [[0, 0], [0, 0], [0, 0], [1, 1]])
    metrics, samples = MetricStore(tmp_path), SampleStore(tmp_path)
    metrics.update()
    samples.update()
    for estimator, told in (("grpo", True), ("ppo", False)):
        found = findings(metrics, samples, {"advantage_estimator": estimator})
        assert any("no signal" in finding["title"] for finding in found) == told


def told(folder: Path, rollouts: int, rewards: list[list[float]], **columns) -> list[list[str]]:
    """What a run of so many rollouts is told after each of them."""
    folder.mkdir()
    warnings, after = LearningWarnings(folder, {"advantage_estimator": "grpo"}), []
    for rollout_id in range(rollouts):
        values = {
            **HEALTHY,
            **{name.replace("__", "/"): fn(rollout_id) for name, fn in columns.items()},
        }
        record = {"rollout_id": rollout_id, "kind": "train", "time": 1e9, **values}
        append_lines(folder / "metrics.jsonl", [record])
        write_groups(folder, rewards, rollout_id)
        after.append(warnings.new())
    return after


def test_nothing_learned_is_reported_once(tmp_path):
    after = told(tmp_path / "a", 8, [[0, 0], [0, 0]])
    assert [len(texts) for texts in after] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert after[4][0].startswith("All rewards are equal. Each of 20 samples since rollout 0")
    after = told(tmp_path / "b", 8, [[0, 1], [1, 0]], train__grad_norm=lambda r: 0.0)
    assert [len(texts) for texts in after] == [0, 0, 0, 0, 1, 0, 0, 0]
    assert "gradient norm 0" in after[4][0]
    after = told(tmp_path / "c", 8, [[0, 1], [1, 0]], train__entropy=lambda r: 1e-41)
    assert "Entropy collapsed" in after[4][0]
    assert not any(told(tmp_path / "d", 8, [[0, 1], [1, 0]]))


def test_repeated_prompts_are_reported_at_once(tmp_path):
    rows = [
        make_row(group, group * 10 + place, prompt=f"p{group % 3}")
        for group in range(8)
        for place in range(2)
    ]
    append_samples(tmp_path, 0, rows)
    (text,) = LearningWarnings(tmp_path, {}).new()
    assert "The 8 groups of rollout 0 have 3 different prompts" in text


# ---- metrics as curves


def test_thinned_points_are_means_with_their_range():
    values = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 2.0, 8.0])
    drawn = thinned(np.arange(8.0), values, limit=4)
    assert drawn["x"].tolist() == [0.5, 2.5, 4.5, 6.5]
    assert drawn["y"] == [2.0, 5.0, None, 5.0]
    assert drawn["low"] == [1.0, 5.0, None, 2.0] and drawn["high"] == [3.0, 5.0, None, 8.0]


def test_a_metric_keeps_its_order_over_records_of_several_shapes(tmp_path):
    store = MetricStore(tmp_path)
    for r in range(6):
        extra = {"b": 0.0} if r % 2 else {}
        record = {"rollout_id": r, "kind": "perf", "time": float(r), "a": r * 10.0, **extra}
        append_lines(tmp_path / "metrics.jsonl", [record])
        if r % 3 == 0:
            store.update()
    store.update()
    assert store.series["a"].values.tolist() == [0, 10, 20, 30, 40, 50]
    assert store.series["b"].rollouts.tolist() == [1, 3, 5]


# ---- the state of a run


def state_of(folder: Path) -> str:
    view = RunView(folder, "run")
    view.update()
    return view.state()[0]


@pytest.mark.parametrize("outcome", ["complete", "stopped", "failed"])
def test_a_recorded_end_is_the_state(tmp_path, outcome):
    log = EventLog(tmp_path)
    log.event("start", host=socket.gethostname(), pid=os.getpid())
    log.event("end", "why", outcome=outcome)
    expected = {"complete": "finished", "stopped": "stopped", "failed": "failed"}[outcome]
    assert state_of(tmp_path) == expected


def test_a_run_that_was_resumed_runs_again(tmp_path):
    log = EventLog(tmp_path)
    log.event("end", outcome="failed")
    log.event("start", host="another machine", pid=1)
    assert state_of(tmp_path) == "running"  # its files have just changed


def test_a_run_of_this_machine_is_alive_while_it_holds_its_lock(tmp_path):
    EventLog(tmp_path).event("start", host=socket.gethostname(), pid=os.getpid())
    assert state_of(tmp_path) == "dead"
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert state_of(tmp_path) == "running"
    os.close(handle)
    assert state_of(tmp_path) == "dead"


@pytest.mark.parametrize(
    ("lock", "device", "locked"),
    [
        ("1: FLOCK  ADVISORY  WRITE 42 fe:1a:99 0 EOF", (0xFE, 0x1A), True),
        ("1: FLOCK  ADVISORY  WRITE 42 fe:1b:99 0 EOF", (0xFE, 0x1A), False),  # another disk's 99
        ("1: FLOCK  ADVISORY  WRITE 42 00:1b:99 0 EOF", (0xFE, 0x1A), False),  # in /dev/shm
        ("1: FLOCK  ADVISORY  WRITE 42 fe:1a:199 0 EOF", (0xFE, 0x1A), False),
        ("1: FLOCK  ADVISORY  WRITE 42 00:1b:99 0 EOF", (0, 0x2C), True),  # stat of btrfs differs
        ("1: -> FLOCK  ADVISORY  WRITE 42 fe:1a:99 0 EOF", (0xFE, 0x1A), False),  # waits for it
        ("1: POSIX  ADVISORY  WRITE 42 fe:1a:99 0 EOF", (0xFE, 0x1A), False),
    ],
)
def test_a_lock_of_the_same_inode_on_another_device_is_another_runs(lock, device, locked):
    assert is_lock_of(lock, os.makedev(*device), 99) is locked


def test_a_run_of_another_machine_is_dead_once_it_is_silent(tmp_path):
    EventLog(tmp_path).event("start", host="another machine", pid=1)
    assert state_of(tmp_path) == "running"
    long_ago = time.time() - 3600
    os.utime(tmp_path / "events.jsonl", (long_ago, long_ago))
    assert state_of(tmp_path) == "dead"
