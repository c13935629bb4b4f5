"""Conversations of an agent, recorded as exact tokens: sessions, segments and turns.

A session belongs to one sample. Each answer is a turn: the token ids that were sent to the engine, and the
tokens and log-probs that it returned. A request whose messages extend the conversation so far continues its
segment: the ids of the past are kept and only the new messages are tokenized. A request with a different
past (the client edited or shortened it, or went back to retry) forks a new segment:

    turn 1 ─ turn 2 ─ turn 3          segment 0
        └─── turn 2' ─ turn 3'        segment 1: shares the tokens of turn 1, which count in segment 0 only
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.data.openai_replies import same_calls
from slime.data.openai_requests import Message
from slime.rollout.context import RolloutContext
from slime.rollout.sampling import SamplingParams


@dataclass(kw_only=True)
class Turn:
    """One answer of the model. `messages` is the conversation with the answer as its last message."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    prompt_ids: list[int]  # everything that was sent to the engine
    output_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    status: Status
    text: str

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]


@dataclass(kw_only=True)
class Segment:
    turns: list[Turn]
    num_shared: int = 0  # leading turns that count in the segment this one was forked from

    @property
    def last(self) -> Turn:
        return self.turns[-1]


@dataclass(kw_only=True)
class Session:
    """The conversations of one trajectory. The run's settings limit their lengths, not the client's."""

    sample: Sample
    sampling_params: SamplingParams
    context: RolloutContext  # of the rollout that the session belongs to
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    segments: list[Segment] = field(default_factory=list)
    num_forks: int = 0
    aborted: bool = False
    error: UserError | None = None  # raised by one of its requests; it ends the run

    def find_segment(
        self, messages: list[Message], tools: list[dict[str, Any]]
    ) -> tuple[Segment, int] | None:
        """Return the segment, and how many of its turns, that these messages continue; None for a new one.

        A longer past is preferred to a shorter one, then the end of a segment to its middle.
        """
        best: tuple[Segment, int] | None = None
        for segment in self.segments:
            for count in range(len(segment.turns), 0, -1):
                turn = segment.turns[count - 1]
                if turn.tools != tools or not _continues(turn.messages, messages):
                    continue
                if best is None or _preference(segment, count) > _preference(*best):
                    best = segment, count
                break
        return best

    def record(self, place: tuple[Segment, int] | None, turn: Turn) -> None:
        if place is None:
            self.num_forks += bool(self.segments)
            self.segments.append(Segment(turns=[turn]))
            return
        segment, count = place
        if count == len(segment.turns):
            segment.turns.append(turn)
            return
        self.num_forks += 1
        self.segments.append(Segment(turns=[*segment.turns[:count], turn], num_shared=count))

    def samples(self) -> list[Sample]:
        """Return one sample per segment, in the order in which they began."""
        return [self._to_sample(segment, number) for number, segment in enumerate(self.segments)]

    def _to_sample(self, segment: Segment, number: int) -> Sample:
        sample = self.sample.clone()
        first = segment.turns[0]
        sample.tokens = list(first.prompt_ids)
        sample.response, sample.response_length, sample.weight_versions = "", 0, []
        sample.loss_mask, sample.rollout_log_probs = [], []
        for index, turn in enumerate(segment.turns):
            between = turn.prompt_ids[len(sample.tokens) :]
            if between:
                sample.append_response_tokens(tokens=between, trainable=False)
            sample.append_response_tokens(
                tokens=turn.output_ids,
                log_probs=turn.log_probs,
                weight_versions=turn.weight_versions,
                trainable=index >= segment.num_shared,
            )
        sample.response = segment.last.text
        sample.status = Status.ABORTED if self.aborted else segment.last.status
        sample.metadata["messages"] = segment.last.messages
        sample.metadata["segment"] = number
        return sample


def _preference(segment: Segment, count: int) -> tuple[int, bool]:
    return len(segment.turns[count - 1].messages), count == len(segment.turns)


def _continues(past: list[Message], messages: list[Message]) -> bool:
    """Return whether `messages` start with `past` and have more."""
    return len(messages) > len(past) and all(map(_same, past, messages))


def _same(one: Message, other: Message) -> bool:
    return (
        one["role"] == other["role"]
        and one["content"] == other["content"]
        and one.get("tool_call_id") == other.get("tool_call_id")
        and same_calls(one.get("tool_calls"), other.get("tool_calls"))
    )
