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
from pathlib import Path
from typing import Any

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.data.images import content_hash, data_uri, read_image
from slime.data.openai_replies import same_calls
from slime.data.openai_requests import ApiError, ChatRequest, Message
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
    """The conversations of one trajectory."""

    sample: Sample
    sampling_params: SamplingParams
    context: RolloutContext  # of the rollout that the session belongs to
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    segments: list[Segment] = field(default_factory=list)
    images: dict[str, bytes] = field(default_factory=dict)  # of its messages, by hash
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
        given = images_in(first.messages, self.images)
        sample.multimodal_inputs = {"images": given} if given else None
        for index, turn in enumerate(segment.turns):
            later = images_in(turn.messages, self.images)[len(sample.image_files) :]
            if later:
                sample.append_images(later)
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


def give_row_images(body: Any, files: list[bytes]) -> None:
    """Fill the parts {"type": "image"} of a request's messages, as sample.messages has them, with the row's images."""
    rest = iter(files)
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if part != {"type": "image"}:
                continue
            if (file := next(rest, None)) is None:
                raise ApiError(
                    f'more parts {{"type": "image"}} than images in the row, which has {len(files)}'
                )
            part.update(type="image_url", image_url={"url": data_uri(file)})


def keep_images(request: ChatRequest, images: dict[str, bytes]) -> None:
    """Add the images of a request to `images` by hash, and put the hashes into its messages.

    Only data URIs are read: a client must not make this process open files or addresses.
    """
    urls = iter(request.images)
    for message in request.messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] != "image":
                continue
            url = next(urls)
            if not url.startswith("data:"):
                raise ApiError("an image must be a data URI: data:image/png;base64,...")
            try:
                file = read_image(url, Path())
            except UserError as error:
                raise ApiError(str(error)) from None
            part["image"] = content_hash(file)
            images[part["image"]] = file


def images_in(messages: list[Message], images: dict[str, bytes]) -> list[bytes]:
    """Return the images of messages, in order, after `keep_images`."""
    parts = [part for m in messages if isinstance(m["content"], list) for part in m["content"]]
    return [images[part["image"]] for part in parts if part["type"] == "image"]


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
