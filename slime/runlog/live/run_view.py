"""One run as the web page shows it: state, numbers, events, timeline; files are read only when needed."""

from __future__ import annotations

import os
import socket
import time
from bisect import bisect_left
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from slime.core.errors import UserError
from slime.runlog import metric_names as names
from slime.runlog.earlier_runs import METRICS_FILE, RESOLVED_FILE
from slime.runlog.event_log import EVENTS_FILE, TIMELINE_FILE
from slime.runlog.format import layout_of, model_name
from slime.runlog.jsonl import LineTail, parse_line
from slime.runlog.live.findings import findings
from slime.runlog.live.metric_store import MetricStore
from slime.runlog.live.sample_store import SampleStore
from slime.runlog.run_folder import read_starts
from slime.runlog.run_yaml import read_resolved
from slime.runlog.token_log import TOKENS_FOLDER, VOCABULARY_FILE, words_of

MARKS = (METRICS_FILE, RESOLVED_FILE, EVENTS_FILE)
_RECENT_S = 120.0  # without a visible lock, a folder that changed this recently counts as running
_MAX_EVENTS = 5000
_PLAIN = (str, int, float, type(None))
_MAX_SPANS = 4000  # of one process in one answer


def is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


def as_text(path: str | Path) -> str:
    """Return a path as JSON can hold it: file names may be invalid Unicode."""
    return os.fsencode(path).decode(errors="replace")


class RunView:
    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir, self.name = run_dir, name
        self.metrics, self.samples = MetricStore(run_dir), SampleStore(run_dir)
        self.events = EventStore(run_dir)
        self.timeline = TimelineStore(run_dir)
        self._words = LineTail(run_dir / TOKENS_FOLDER / VOCABULARY_FILE)
        self._vocabulary: dict[int, str] = {}
        self._config: tuple[float, dict[str, Any]] = (0.0, {})
        self._findings: tuple[tuple[int, int], list[dict[str, Any]]] | None = None

    def update(self) -> None:
        """Read metrics and events that were written since the last call."""
        self.metrics.update()
        self.events.update()

    def brief(self) -> dict[str, Any]:
        """Return what the list of runs shows; `version` changes with every new record."""
        state, text = self.state()
        reward = self.metrics.values(names.REWARD)
        return {
            "name": self.name,
            "path": as_text(self.run_dir),
            "state": state,
            "state_text": text,
            "version": self.metrics.version + self.events.count,
            "rollouts": self._rollouts(),
            "num_rollout": self._wanted(),
            "reward": self.metrics.last(names.REWARD) if len(reward) else None,
            "metrics": sorted(self.metrics.series),
            "first_time": self.metrics.first_time,
            "last_time": self.metrics.last_time,
        }

    def overview(self) -> dict[str, Any]:
        """Return the head of the run's page: what it is, what it learned, the latest numbers."""
        config = {name: entry["value"] for name, entry in self.config().items()}
        latest = {name: self.metrics.last(name) for name in self.metrics.series}
        evals = names.eval_rewards(self.metrics.series)
        return {
            **self.brief(),
            "model": model_name(config.get("hf_checkpoint")),
            "layout": layout_of(config),
            "estimator": config.get("advantage_estimator"),
            "latest": latest,
            "first": {n: float(self.metrics.values(metric)[0]) for n, metric in evals.items()},
            "evals": evals,
            "seconds": float(self.metrics.values(names.STEP_TIME).sum()),
            "step_seconds": _mean(self.metrics.values(names.STEP_TIME)[-10:]),
            "tokens": float(self.metrics.values(names.RESPONSE_TOKENS).sum()),
            "starts": read_starts(self.run_dir)[-20:],
            "events": self.health()[-200:],
            "findings": self.findings(),
        }

    def health(self) -> list[dict[str, Any]]:
        """Return the events with their rollout, and the rollouts in which samples failed."""
        events = self.events.records[-1000:]
        failed = self.metrics.series.get(names.FAILED)
        if failed is not None:
            places = np.flatnonzero(failed.values > 0)[-200:]
            rows = ((failed.times[p], failed.values[p], failed.rollouts[p]) for p in places)
            events += [
                {
                    "time": float(t),
                    "kind": "failed",
                    "text": f"{n:.0f} samples failed in rollout {r}",
                }
                for t, n, r in rows
            ]
        steps = self.metrics.series.get(names.STEP_TIME)
        ends = np.zeros(0) if steps is None else steps.times
        found = [{**e, "rollout": int(np.searchsorted(ends, e["time"])) - 1} for e in events]
        return sorted(found, key=lambda event: event["time"])

    def findings(self) -> list[dict[str, Any]]:
        self.samples.update()
        version = self.metrics.version, self.samples.version
        if self._findings is None or self._findings[0] != version:
            config = {name: entry["value"] for name, entry in self.config().items()}
            self._findings = version, findings(self.metrics, self.samples, config)
        return self._findings[1]

    def config(self) -> dict[str, dict[str, Any]]:
        """Return {"lr": {"value": 1e-6, "origin": "command line"}, ...}."""
        path = self.run_dir / RESOLVED_FILE
        try:
            changed = path.stat().st_mtime
            if changed != self._config[0]:
                self._config = changed, self._config[1]  # even if the file cannot be read
                self._config = changed, read_resolved(path)
        except (OSError, UserError):
            pass
        return self._config[1]

    def _wanted(self) -> int | None:
        value = self.config().get("num_rollout", {}).get("value")
        return value if type(value) is int and 0 < value < 2**53 else None

    def vocabulary(self) -> dict[int, str]:
        for _, line in self._words.read():
            self._vocabulary.update(words_of(parse_line(line) or {}))
        return self._vocabulary

    def state(self) -> tuple[str, str]:
        """Return "running", "finished", "stopped", "failed" or "dead", and a sentence."""
        end = self.events.end
        if end is None and self._seems_alive():
            return "running", self._progress()
        if end is not None and end.get("outcome") == "failed":
            return "failed", str(end.get("text", ""))
        if end is not None:
            done = end.get("outcome") == "complete"
            return ("finished" if done else "stopped"), self._progress()
        wanted = self._wanted()
        if wanted and self._rollouts() >= wanted:
            return "finished", self._progress()
        return "dead", f"no process writes to it, and it recorded no end; {self._progress()}"

    def _seems_alive(self) -> bool:
        """Return whether its lock is held, or for another machine's run, whether its files changed recently."""
        if _is_locked(self.run_dir):
            return True
        here = self.events.start.get("host") == socket.gethostname()
        return not here and self._changed_s() < _RECENT_S

    def _progress(self) -> str:
        wanted = self._wanted()
        done = self._rollouts()
        return f"{done} of {wanted} rollouts" if wanted else f"{done} rollouts"

    def _rollouts(self) -> int:
        series = self.metrics.series.get(names.LOSS) or self.metrics.series.get(names.SAMPLES)
        return len(set(series.rollouts.tolist())) if series is not None else 0

    def _changed_s(self) -> float:
        times = [_changed(self.run_dir / mark) for mark in (METRICS_FILE, EVENTS_FILE)]
        return time.time() - max(times)


class EventStore:
    """The events of a run, and the end of its last start."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = LineTail(run_dir / EVENTS_FILE)
        self._kept: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self.engines: dict[str, list[tuple[float, int]]] = {}  # url -> (time, weight version)
        self.start: dict[str, Any] = {}  # the last one
        self.end: dict[str, Any] | None = None  # of that start; None: it has not ended
        self.count = 0

    @property
    def records(self) -> list[dict[str, Any]]:
        return list(self._kept)

    def update(self) -> None:
        for _, line in self._tail.read():
            record = parse_line(line)
            if record is None or type(record.get("time")) not in (int, float):
                continue
            kind = record.get("kind")
            if kind == "weights":
                self._note_versions(record)
                continue
            if kind == "start":
                self.start, self.end = record, None
            elif kind == "end":
                self.end = record
            self._kept.append({n: v for n, v in record.items() if isinstance(v, _PLAIN)})
            self.count += 1

    def _note_versions(self, record: dict[str, Any]) -> None:
        version, urls = record.get("version"), record.get("engines")
        if isinstance(version, int) and isinstance(urls, list):
            for url in urls[:256]:
                self.engines.setdefault(str(url), []).append((record["time"], version))


class TimelineStore:
    """Phases of each process in Unix time, and its memory; read when the timeline is first shown."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = LineTail(run_dir / TIMELINE_FILE)
        self.spans: dict[str, list[tuple[float, float, str]]] = {}  # (end, start, name), by end
        self.memory: dict[str, list[tuple[float, dict[str, int]]]] = {}

    def update(self) -> None:
        for _, line in self._tail.read():
            record = parse_line(line)
            if record is not None and isinstance(record.get("spans"), list):
                self._add(str(record.get("process", "")), record)

    def _add(self, process: str, record: dict[str, Any]) -> None:
        new = [s for s in record["spans"] if _is_span(s)]
        if new:
            spans = self.spans.setdefault(process, [])
            spans += sorted((float(end), float(start), str(name)) for name, start, end in new)
        when = max((float(end) for _, _, end in new), default=record.get("time"))
        memory = record.get("memory")
        if isinstance(when, float) and isinstance(memory, dict):
            plain = {n: v for n, v in memory.items() if type(v) is int}
            self.memory.setdefault(process, []).append((when, plain))

    @property
    def ends(self) -> tuple[float, float] | None:
        """The first start and the last end of all phases."""
        every = [spans for spans in self.spans.values() if spans]
        if not every:
            return None
        return min(s[0][1] for s in every), max(s[-1][0] for s in every)

    def between(self, start: float, end: float) -> dict[str, list[tuple[str, float, float]]]:
        found = {}
        for process, spans in self.spans.items():
            first = bisect_left(spans, (start, 0.0, ""))
            shown = spans[first : first + _MAX_SPANS]
            found[process] = [(name, began, ended) for ended, began, name in shown if began <= end]
        return found


def _is_span(span: object) -> bool:
    """Return whether this is [name, start, end], as a run writes them."""
    if not isinstance(span, list) or len(span) != 3:
        return False
    return isinstance(span[0], str) and all(type(when) in (int, float) for when in span[1:])


def _is_locked(folder: Path) -> bool:
    """Return whether a process of this machine holds the run's lock; trying to take it could fail a start."""
    try:
        status = os.stat(folder)
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any(is_lock_of(line, status.st_dev, status.st_ino) for line in locks.splitlines())


def is_lock_of(line: str, device: int, inode: int) -> bool:
    """Return whether a line of /proc/locks is a flock of this file: `1: FLOCK ADVISORY WRITE 42 fe:00:99 0 EOF`.

    Filesystems without a block device have major number 0, and stat may return another minor for them (btrfs).
    """
    words = line.split()
    if words[1:2] != ["FLOCK"]:  # waiting processes have "->" there
        return False
    major, minor, number = words[5].split(":")
    if int(number) != inode or int(major, 16) != os.major(device):
        return False
    return os.major(device) == 0 or int(minor, 16) == os.minor(device)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None
