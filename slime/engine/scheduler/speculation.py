"""Speculative decoding by prompt lookup: what followed the last tokens before is guessed to follow again.

    text so far  ... the cat sat on the mat. the cat        newest token: "cat"
    draft                                    sat on the     what stood after "the cat" earlier
    drawn                                    sat on a       one forward: kept, kept, kept (the first
                                                            wrong guess gives way to the token drawn)

Every position is drawn from the model's own distribution with the number that belongs to the request's
seed and that position, whether it was guessed or not; a guess only decides how many draws one forward
brings. So tokens are those that decoding one by one would give, and a draft d is kept with the model's
probability of d, which is what rejection sampling does for a draft that is certain of itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.engine.scheduler.request import Request
from slime.engine.scheduler.step_output import Flight, StepOutput

_FEWEST, _MOST = 2, 4  # tokens at the end of the text that are looked for in it
DEFAULT_WINDOW = 12  # tokens of a request in one forward, as SGLang's NGRAM has it


@dataclass(kw_only=True, eq=False)
class Guesses:
    """What was guessed for one request, and where in its text a guess may be found.

    After the text [5, 9, 5, 9] ``ends`` is {(5, 9): 2, (9, 5): 3, (5, 9, 5): 3}: where the token after
    each run stands. The last run is not in it yet: nothing has followed.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_seen: int = 0  # tokens of the text that are in `ends`
    reach: int = 1 << 30  # draft tokens worth trying, by how the last draft did
    num_steps: int = 0
    num_proposed: int = 0
    num_correct: int = 0

    def find(self, text: list[int]) -> int | None:
        """Where the token stands that followed when the text last ended as it does now."""
        for end in range(max(self.num_seen, 1), len(text)):
            for size in range(_FEWEST, min(_MOST, end) + 1):
                self.ends[tuple(text[end - size : end])] = end
        self.num_seen = len(text)
        for size in range(min(_MOST, len(text)), _FEWEST - 1, -1):
            end = self.ends.get(tuple(text[-size:]))
            if end is not None:
                return end
        return None

    def count(self, num_proposed: int, num_correct: int) -> None:
        """Try twice as much after a draft that was right to its end, else what would have been right."""
        self.num_steps += 1
        self.num_proposed += num_proposed
        self.num_correct += num_correct
        if num_proposed:
            right = num_correct == num_proposed
            self.reach = 2 * num_proposed if right else max(num_correct, 1)


class Drafter:
    """`window`: at most so many tokens of a request in one forward, the newest one included."""

    def __init__(self, window: int) -> None:
        self._most = window - 1

    def draft(self, request: Request, most: int) -> list[int]:
        """Up to `most` guesses at what follows the text of the request."""
        if request.guesses is None:
            request.guesses = Guesses()
        params = request.params
        most = min(most, self._most, request.guesses.reach)
        # Penalties and the least length change a distribution by the tokens before it, guesses among them.
        if most < 1 or params.penalized or params.min_new_tokens:
            return []
        end = request.guesses.find(request.token_ids)
        return [] if end is None else _continue(request.token_ids, end, most)


def _continue(text: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start`; a text that repeats itself goes on past its own end."""
    period = len(text) - start
    return [text[start + i % period] for i in range(count)]


@dataclass(kw_only=True, eq=False)
class GuessFlight:
    """A step with drafts, whose output holds no draw behind a wrong guess."""

    flight: Flight
    drafts: dict[Request, list[int]]
    immediate: bool = True

    def collect(self) -> StepOutput:
        return keep_right(self.flight.collect(), self.drafts)


def keep_right(output: StepOutput, drafts: dict[Request, list[int]]) -> StepOutput:
    """Draws up to and with the first that differs from the guess; a request's come in order."""
    kept = StepOutput(requests=[], tokens=[], log_probs=[], scored=output.scored)
    num_right = dict.fromkeys(drafts, 0)
    open_drafts = set(drafts)  # all guesses so far were right
    for request, token, log_prob in zip(
        output.requests, output.tokens, output.log_probs, strict=True
    ):
        if request in drafts and request not in open_drafts:
            continue
        kept.requests.append(request)
        kept.tokens.append(token)
        kept.log_probs.append(log_prob)
        if request in drafts:
            draft, right = drafts[request], num_right[request]
            if right < len(draft) and draft[right] == token:
                num_right[request] += 1
            else:
                open_drafts.discard(request)
    for request, draft in drafts.items():
        assert request.guesses is not None
        request.guesses.count(len(draft), num_right[request])
    return kept
