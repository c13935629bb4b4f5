"""The samples of a run: the table of all of them, read in steps, and the stored texts."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from slime.runlog.jsonl import LineTail, parse_line
from slime.runlog.sample_log import SAMPLES_FILE, SampleRow, parse_row
from slime.runlog.sample_table import (
    MOST_RECORDS,
    PROMPTS_FILE,
    SAMPLE_DTYPE,
    STATUSES,
    TABLE_FILE,
    read_header,
    read_table,
    row_record,
)
from slime.utils.untrusted_files import open_regular

_MAX_LINE_BYTES = 1 << 22
_LATEST = 100_000  # rows that are searched for the latest rollouts


class SampleStore:
    """`rows` grows with the run. Runs without a table (of earlier versions) get one from samples.jsonl."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.datasets: list[str] = []
        self.version = 0  # counts up whenever rows were added or removed
        self._buffer = np.zeros(0, SAMPLE_DTYPE)
        self._count = 0
        self._file: tuple[int, int] | None = None  # inode of the table, and records read
        self._tail = LineTail(run_dir / SAMPLES_FILE)
        self._restarts = 0
        self._prompt_lines = LineTail(run_dir / PROMPTS_FILE)
        self._prompts: dict[int, str] = {}
        self._groups: tuple[int, np.ndarray] | None = None  # by version

    @property
    def rows(self) -> np.ndarray:
        return self._buffer[: self._count]

    def update(self) -> None:
        """Read what was written since the last call."""
        path = self.run_dir / TABLE_FILE
        try:
            found = os.stat(path)
        except OSError:
            return self._index_lines()
        if self._file is None or self._file[0] != found.st_ino or self._file[1] > _records(found):
            self._count, self._file = 0, (found.st_ino, 0)
            self.version += 1
        if _records(found) > self._file[1]:
            self.datasets = read_header(self.run_dir)
            new = read_table(self.run_dir, self._file[1])
            self._file = found.st_ino, self._file[1] + len(new)
            known = (new["dataset"] >= 0) & (new["dataset"] < len(self.datasets))
            self._add(new if known.all() else new[known])
        return None

    def text(self, row: int) -> SampleRow | None:
        """Return the kept text of a row, or None."""
        offset = int(self.rows["text"][row])
        if offset < 0:
            return None
        try:
            with open_regular(self.run_dir / SAMPLES_FILE) as file:
                file.seek(offset)
                record = parse_line(file.readline(_MAX_LINE_BYTES))
        except OSError:
            return None
        found = None if record is None else parse_row(record)
        return found[1] if found and found[0] == self.rows["rollout_id"][row] else None

    @property
    def names(self) -> list[str]:
        """Return the dataset filters of a list: each dataset, and "train" for all training data."""
        several = any(name.startswith("train/") for name in self.datasets)
        return ["train"] * (several and "train" not in self.datasets) + self.datasets

    def find(self, dataset: str, rollout_id: int, index: int) -> int | None:
        """Return the row of one sample."""
        if dataset not in self.datasets:
            return None
        rows = self.rows
        same = (rows["index"] == index) & (rows["rollout_id"] == rollout_id)
        found = np.flatnonzero(same & (rows["dataset"] == self.datasets.index(dataset)))
        return int(found[-1]) if len(found) else None

    def groups(self) -> np.ndarray:
        """Return one record per group; the samples of a group are adjacent in the table."""
        if self._groups is None or self._groups[0] != self.version:
            self._groups = self.version, _grouped(self.rows)
        return self._groups[1]

    def latest_groups(self, since: int) -> np.ndarray:
        """Return the groups of the latest rollouts, without scanning the whole table."""
        rows = self.rows[-_LATEST:]
        return _grouped(rows[rows["rollout_id"] >= since])

    def prompts(self) -> dict[int, str]:
        """Return the kept beginnings of prompts by hash."""
        for _, line in self._prompt_lines.read():
            record = parse_line(line) or {}
            with suppress(KeyError, TypeError, ValueError):
                self._prompts[int(record["hash"], 16)] = str(record["text"])
        return self._prompts

    def _add(self, new: np.ndarray) -> None:
        if not len(new):
            return
        self.version += 1
        if not self._count:
            self._buffer, self._count = new, len(new)
            return
        total = self._count + len(new)
        if total > len(self._buffer):
            grown = np.zeros(max(total, 2 * len(self._buffer)), SAMPLE_DTYPE)
            grown[: self._count] = self.rows
            self._buffer = grown
        self._buffer[self._count : total] = new
        self._count = total

    def _index_lines(self) -> None:
        lines = self._tail.read()
        if self._tail.restarts != self._restarts:
            self._restarts, self._count, self.datasets = self._tail.restarts, 0, []
            self.version += 1
        records = []
        for offset, line in lines:
            record = parse_line(line)
            found = None if record is None else parse_row(record)
            if found is not None:
                records.append(self._indexed(offset, *found))
        self._add(np.array(records, SAMPLE_DTYPE))

    def _indexed(self, offset: int, rollout_id: int, row: SampleRow) -> tuple[Any, ...]:
        if row.kind not in self.datasets:
            self.datasets.append(row.kind)
        return row_record(row, rollout_id, self.datasets.index(row.kind), offset)


GROUP_DTYPE = np.dtype(
    [
        ("first", "<i8"),  # row number
        ("size", "<i4"),
        ("rollout_id", "<i4"),
        ("dataset", "<i2"),
        ("group", "<i8"),
        ("prompt", "<u8"),
        ("mean", "<f4"),
        ("low", "<f4"),
        ("high", "<f4"),
        ("failed", "<i4"),
        ("truncated", "<i4"),
        ("length", "<f4"),
    ]
)


def _grouped(rows: np.ndarray) -> np.ndarray:
    if not len(rows):
        return np.zeros(0, GROUP_DTYPE)
    keys = ("rollout_id", "dataset", "group")
    changes = np.zeros(len(rows), bool)
    changes[0] = True
    for key in keys:
        changes[1:] |= rows[key][1:] != rows[key][:-1]
    first = np.flatnonzero(changes)
    failed = rows["status"] == STATUSES.index("failed")
    scored = np.isfinite(rows["reward"]) & ~failed
    counts = np.add.reduceat(scored.astype(np.int32), first)
    groups = np.zeros(len(first), GROUP_DTYPE)
    groups["first"], groups["size"] = first, np.diff(np.append(first, len(rows)))
    for key in (*keys, "prompt"):
        groups[key] = rows[key][first]
    reward = rows["reward"]
    sums = np.add.reduceat(np.where(scored, reward, 0), first)
    groups["mean"] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    groups["low"] = np.minimum.reduceat(np.where(scored, reward, np.inf), first)
    groups["high"] = np.maximum.reduceat(np.where(scored, reward, -np.inf), first)
    groups["failed"] = np.add.reduceat(failed.astype(np.int32), first)
    truncated = rows["status"] == STATUSES.index("truncated")
    groups["truncated"] = np.add.reduceat(truncated.astype(np.int32), first)
    groups["length"] = np.add.reduceat(rows["response_len"], first) / groups["size"]
    return groups


def without_signal(groups: np.ndarray) -> np.ndarray:
    """Return which groups have equal rewards: with these, GRPO computes no gradient."""
    return (groups["size"] > 1) & (groups["low"] >= groups["high"])


def _records(found: os.stat_result) -> int:
    return min(found.st_size // SAMPLE_DTYPE.itemsize, MOST_RECORDS)
