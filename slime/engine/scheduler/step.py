"""What one step computes, and what comes out of it: at once, or when the device has finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slime.engine.scheduler.request import Request


@dataclass(frozen=True, kw_only=True)
class TokenSpan:
    """Tokens start..start+count of a request to compute in one forward, with sampling if they are its last.

    The last of them may be draft tokens, which are not in `request.token_ids`: then a token is sampled after
    the newest token and after each draft token.
    """

    request: Request
    start: int
    count: int
    samples: bool
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        end = self.start + self.count - len(self.draft)
        return self.request.token_ids[self.start : end] + self.draft

    @property
    def num_samples(self) -> int:
        """Return after how many of its last tokens one is sampled."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What one step computes: the newest token of each decoding request, and prefill chunks.

    With speculative decoding the decoding requests are in `drafts` instead of `decoding`. `decoding` and
    `rows` are the same objects from step to step until a request starts or finishes.
    """

    decoding: list[Request]
    rows: np.ndarray  # their rows of the page table
    positions: np.ndarray  # of their newest tokens
    prefill: list[TokenSpan]
    drafts: list[TokenSpan] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefill or self.drafts)


@dataclass(kw_only=True, eq=False)
class StepOutput:
    """The tokens sampled in one step, one for each of `requests`, and the log-probs of prompt tokens."""

    requests: list[Request]
    tokens: list[int]
    log_probs: list[float]
    scored: list[tuple[Request, float]]


class PendingStep(Protocol):
    """A launched step that the device may still be computing."""

    @property
    def blocks_next_step(self) -> bool:
        """Return whether the next step needs this one's tokens before it can be launched."""
        ...

    def wait(self) -> StepOutput:
        """Wait for the device and return the output."""
        ...


@dataclass(kw_only=True, eq=False)
class FinishedStep:
    """A step whose output is known when `launch` returns."""

    output: StepOutput
    blocks_next_step: bool = True

    def wait(self) -> StepOutput:
        return self.output


def join_outputs(parts: list[StepOutput]) -> StepOutput:
    if len(parts) == 1:
        return parts[0]
    return StepOutput(
        requests=[request for part in parts for request in part.requests],
        tokens=[token for part in parts for token in part.tokens],
        log_probs=[value for part in parts for value in part.log_probs],
        scored=[entry for part in parts for entry in part.scored],
    )
