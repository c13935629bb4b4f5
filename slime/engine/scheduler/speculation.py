"""Speculative decoding by prompt lookup: draft the tokens that followed an earlier occurrence of the last n-gram.

    text so far  ... the cat sat on the mat. the cat        newest token: "cat"
    draft                                    sat on the     what followed "the cat" earlier
    sampled                                  sat on a       one forward: accepted, accepted, and the first
                                                            wrong draft token is replaced by the sampled one

Every position is sampled from the model's own distribution with the uniform number of the request's seed and
that position, with or without a draft; drafts only decide how many tokens one forward yields. So the tokens
are those of plain decoding, and a draft token d is accepted with the model's probability of d, as rejection
sampling does for a deterministic draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.engine.scheduler.request import Request
from slime.engine.scheduler.step import PendingStep, StepOutput

_MIN_NGRAM, _MAX_NGRAM = 2, 4  # n-gram sizes that are looked up
DEFAULT_WINDOW = 12  # tokens of a request in one forward, SGLang's default for NGRAM


@dataclass(kw_only=True, eq=False)
class DraftHistory:
    """The n-gram index of one request's text, and how many of its draft tokens were accepted.

    After the text [5, 9, 5, 9] ``ends`` is {(5, 9): 2, (9, 5): 3, (5, 9, 5): 3}: the position of the token
    that followed each n-gram last. N-grams at the end of the text are not in it yet: nothing has followed.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_seen: int = 0  # tokens of the text that are in `ends`
    reach: int = 1 << 30  # maximum draft length, adapted to how many draft tokens were accepted
    num_steps: int = 0
    num_proposed: int = 0
    num_correct: int = 0

    def find(self, text: list[int]) -> int | None:
        """Return the position of the token that last followed the n-gram at the end of the text."""
        for end in range(max(self.num_seen, 1), len(text)):
            for size in range(_MIN_NGRAM, min(_MAX_NGRAM, end) + 1):
                self.ends[tuple(text[end - size : end])] = end
        self.num_seen = len(text)
        for size in range(min(_MAX_NGRAM, len(text)), _MIN_NGRAM - 1, -1):
            end = self.ends.get(tuple(text[-size:]))
            if end is not None:
                return end
        return None

    def count(self, num_proposed: int, num_correct: int) -> None:
        """Update the statistics; double the draft length after a fully accepted draft, else reduce it."""
        self.num_steps += 1
        self.num_proposed += num_proposed
        self.num_correct += num_correct
        if num_proposed:
            right = num_correct == num_proposed
            self.reach = 2 * num_proposed if right else max(num_correct, 1)


class Drafter:
    """Makes drafts; `window`: maximum tokens per request and forward, including the newest token."""

    def __init__(self, window: int) -> None:
        self._max_draft = window - 1

    def draft(self, request: Request, most: int) -> list[int]:
        """Return up to `most` draft tokens."""
        if request.draft_history is None:
            request.draft_history = DraftHistory()
        params = request.params
        most = min(most, self._max_draft, request.draft_history.reach)
        # Penalties, min_new_tokens and constraints depend on all earlier tokens, including drafts; top
        # log-probs must be recorded for accepted tokens only.
        special = params.penalized or params.min_new_tokens or params.constrained
        if most < 1 or special or request.num_top_log_probs:
            return []
        end = request.draft_history.find(request.token_ids)
        return [] if end is None else _continue(request.token_ids, end, most)


def _continue(text: list[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start`, repeating periodically past the end of the text."""
    period = len(text) - start
    return [text[start + i % period] for i in range(count)]


@dataclass(kw_only=True, eq=False)
class PendingDraftStep:
    """A step with drafts; its output omits tokens sampled after a rejected draft token."""

    pending: PendingStep
    drafts: dict[Request, list[int]]
    blocks_next_step: bool = True

    def wait(self) -> StepOutput:
        return accept_drafts(self.pending.wait(), self.drafts)


def accept_drafts(output: StepOutput, drafts: dict[Request, list[int]]) -> StepOutput:
    """Keep the sampled tokens of each request up to and including the first that differs from its draft."""
    kept = StepOutput(requests=[], tokens=[], log_probs=[], scored=output.scored)
    num_accepted = dict.fromkeys(drafts, 0)
    still_accepted = set(drafts)  # requests whose draft tokens were all accepted so far
    for request, token, log_prob in zip(
        output.requests, output.tokens, output.log_probs, strict=True
    ):
        if request in drafts and request not in still_accepted:
            continue
        kept.requests.append(request)
        kept.tokens.append(token)
        kept.log_probs.append(log_prob)
        if request in drafts:
            draft, right = drafts[request], num_accepted[request]
            if right < len(draft) and draft[right] == token:
                num_accepted[request] += 1
            else:
                still_accepted.discard(request)
    for request, draft in drafts.items():
        assert request.draft_history is not None
        request.draft_history.count(len(draft), num_accepted[request])
    return kept
