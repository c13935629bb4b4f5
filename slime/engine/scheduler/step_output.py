"""What comes out of a step, at once or once the device is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from slime.engine.scheduler.request import Request


@dataclass(kw_only=True, eq=False)
class StepOutput:
    """The tokens drawn in one step, one for each of `requests`, and the log-probs of prompt tokens."""

    requests: list[Request]
    tokens: list[int]
    log_probs: list[float]
    scored: list[tuple[Request, float]]


class Flight(Protocol):
    """A step that the device may still be at work on."""

    @property
    def immediate(self) -> bool:
        """The next step can be made up only when this one's tokens are known."""
        ...

    def collect(self) -> StepOutput:
        """Wait for it."""
        ...


@dataclass(kw_only=True, eq=False)
class Landed:
    """A step that was done when it came back."""

    output: StepOutput
    immediate: bool = True

    def collect(self) -> StepOutput:
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
