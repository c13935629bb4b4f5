"""Events and timeline of a run, in two files that only the driver writes.

events.jsonl     {"time": 1760000000.0, "kind": "engine", "rollout_id": 7, "text": "engine 0 failed ..."}
timeline.jsonl   {"process": "trainer_0", "time": 1760000001.6, "spans": [["train/steps", 1760000000.0, 1760000001.5]],
                  "memory": {"rss": 500000000}}, one line per process and rollout

Kinds of events: start, end, note, warning, stall, engine, weights. On a full disk
the record is lost and the run continues.
"""

from __future__ import annotations

import time
from pathlib import Path

from slime.core.types import Activity
from slime.runlog.jsonl import LogErrors, append_lines

EVENTS_FILE = "events.jsonl"
TIMELINE_FILE = "timeline.jsonl"
MAX_RANKS = 16  # ranks of a model whose timeline is kept
_MAX_CHARS = 2000  # of an event's text


class EventLog:
    def __init__(self, run_dir: str | Path) -> None:
        self._folder = Path(run_dir)
        self._errors = LogErrors("events and timeline are not written any more: %s")

    def event(self, kind: str, text: str = "", **values: object) -> None:
        record = {"time": time.time(), "kind": kind, "text": text[:_MAX_CHARS], **values}
        self._append(EVENTS_FILE, [record])

    def activities(self, by_process: dict[str, Activity]) -> None:
        """Append each process's phases since its last report."""
        now = time.time()
        records = [
            {"process": name, "time": now, "spans": activity.spans, "memory": activity.memory}
            for name, activity in by_process.items()
            if activity.spans or activity.memory
        ]
        self._append(TIMELINE_FILE, records)

    def _append(self, name: str, records: list[dict[str, object]]) -> None:
        with self._errors.warned_once():
            append_lines(self._folder / name, records)
