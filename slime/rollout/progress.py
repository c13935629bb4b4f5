"""How far the rollout under way is, for whoever displays it; read from any thread."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 15.0


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
    finished: bool = True

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


_current = Progress()
_last_logged = 0.0


def current() -> Progress:
    """A copy of the counters as they stand."""
    return replace(_current)


def start(progress: Progress) -> Progress:
    """Make `progress` the one `current` reports; the caller counts it up."""
    global _current, _last_logged
    _current, _last_logged = progress, time.monotonic()
    return progress


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
