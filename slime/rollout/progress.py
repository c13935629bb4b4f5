"""Progress of the rollout that is running, for logs, the live display and stall warnings."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

from slime.core.types import Sample, Status
from slime.rollout.hook_calls import HookCalls

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 15.0
_FIRST_WARNING_S = 120.0  # without a finished sample; each further warning after twice that time


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
    hook_calls: HookCalls = field(default_factory=HookCalls)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def count(self, sample: Sample) -> None:
        """Count a generated sample, whether or not its group is kept."""
        self.generated_samples += 1
        self.failed_samples += sample.status == Status.FAILED
        self.response_tokens += sample.response_length
        self.last_sample = time.monotonic()


class ProgressMonitor:
    """Holds the progress of the current rollout; may be read from any thread."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._last_logged = 0.0
        self._warned = (
            0.0,
            0.0,
        )  # the last sample before a stall, and its length when last reported

    def start(self, progress: Progress) -> Progress:
        """Report `progress` from now on; the caller updates it."""
        self._progress, self._last_logged = progress, time.monotonic()
        return progress

    def current(self) -> Progress:
        """Return a copy of the counters."""
        return replace(self._progress)

    def log(self, progress: Progress) -> None:
        """Log these counters, at most once every 15 seconds."""
        now = time.monotonic()
        if now - self._last_logged >= _LOG_EVERY_S:
            self._last_logged = now
            logger.info(
                "rollout %d: %d of %d groups, %d dropped, %d samples, %d tokens (%.0f tok/s)",
                progress.rollout_id, progress.kept_groups, progress.target_groups,
                progress.dropped_groups, progress.generated_samples, progress.response_tokens,
                progress.response_tokens / max(progress.seconds, 1e-9),
            )  # fmt: skip

    def stall_warning(self) -> str | None:
        """Return one line for the user if no sample has finished for long, with the longest running hook."""
        progress, now = self._progress, time.monotonic()
        stalled_s = now - progress.last_sample
        last_sample, reported_s = self._warned
        if last_sample != progress.last_sample:
            last_sample, reported_s = progress.last_sample, 0.0
        if progress.finished or stalled_s < max(_FIRST_WARNING_S, 2 * reported_s):
            return None
        self._warned = last_sample, stalled_s
        kind = "evaluation" if progress.evaluation else "rollout"
        text = f"{kind} {progress.rollout_id}: no sample has been finished for {stalled_s:.0f} s"
        for call in progress.hook_calls.running()[:1]:
            text += (
                f"; {call.name} has been running for {now - call.started:.0f} s, at {call.location}"
            )
        return text
