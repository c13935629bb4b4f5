"""How far the rollout under way is, for whoever displays it; read from any thread."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

from slime.core.types import Sample, Status
from slime.rollout.user_code import Calls

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 15.0
_QUIET_S = 120.0  # without a single sample: worth a word, and another each time it has doubled


@dataclass(kw_only=True)
class Progress:
    """3 of 16 groups kept, 2 dropped, 128 samples generated with 9,000 tokens so far."""

    rollout_id: int = -1
    evaluation: bool = False
    target_groups: int = 0
    kept_groups: int = 0
    dropped_groups: int = 0
    generated_samples: int = 0
    failed_samples: int = 0
    response_tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    last_sample: float = field(default_factory=time.monotonic)
    finished: bool = True
    calls: Calls = field(default_factory=Calls)  # of user code, under way

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def count(self, sample: Sample) -> None:
        """A sample was generated, whatever becomes of its group."""
        self.generated_samples += 1
        self.failed_samples += sample.status == Status.FAILED
        self.response_tokens += sample.response_length
        self.last_sample = time.monotonic()


_current = Progress()
_told = (0.0, 0.0)  # the last sample before a silence, and how long it was when last told of
_last_logged = 0.0


def current() -> Progress:
    """A copy of the counters as they stand."""
    return replace(_current)


def start(progress: Progress) -> Progress:
    """Make `progress` the one `current` reports; the caller counts it up."""
    global _current, _last_logged
    _current, _last_logged = progress, time.monotonic()
    return progress


def silence() -> str | None:
    """One line for the user if nothing has come for long, with the user code that is under way."""
    global _told
    progress, now = _current, time.monotonic()
    quiet = now - progress.last_sample
    since, told = _told if _told[0] == progress.last_sample else (progress.last_sample, 0.0)
    if progress.finished or quiet < max(_QUIET_S, 2 * told):
        return None
    _told = since, quiet
    name = "evaluation" if progress.evaluation else "rollout"
    text = f"{name} {progress.rollout_id}: no sample has been finished for {quiet:.0f} s"
    if call := progress.calls.longest():
        text += f"; {call.what} has been running for {now - call.since:.0f} s, at {call.place}"
    return text


def log_now_and_then(progress: Progress) -> None:
    global _last_logged
    now = time.monotonic()
    if now - _last_logged >= _LOG_EVERY_S:
        _last_logged = now
        logger.info(
            "rollout %d: %d of %d groups, %d dropped, %d samples, %d tokens (%.0f tok/s)",
            progress.rollout_id, progress.kept_groups, progress.target_groups,
            progress.dropped_groups, progress.generated_samples, progress.response_tokens,
            progress.response_tokens / max(progress.seconds, 1e-9),
        )  # fmt: skip
