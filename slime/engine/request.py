"""One request on its way through the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from slime.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class FinishReason:
    """Why generation ended: "stop" (a token or string matched), "length" or "abort"."""

    kind: str
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None  # of an abort that must become an HTTP error


@dataclass(kw_only=True)
class VersionSpan:
    """Output tokens start..end (end exclusive) were produced by weights of this version."""

    version: str
    start: int
    end: int


@dataclass(kw_only=True, eq=False)
class Request:
    """`token_ids` is the prompt and then the output; `num_computed` of them have their keys and values
    in the cache, in `pages` in order.

        prompt [5, 9, 5], two tokens generated, the second not yet run through the model::

            token_ids = [5, 9, 5, 7, 6]     prompt_len = 3     num_computed = 4
    """

    # given
    rid: str
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    return_logprob: bool = False
    logprob_start_len: int = -1  # -1: no log-probs of the prompt
    stream: bool = False
    arrival: float = field(default_factory=time.perf_counter)
    # kept by the scheduler
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache when first admitted
    num_retractions: int = 0
    row: int = -1  # row of the page table while running
    cache_epoch: int = -1  # which generation of the prefix cache the pages may go to
    # filled in step by step
    output_log_probs: list[float] = field(default_factory=list)
    input_log_probs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Tokens to run through the model before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    def append(self, token: int, log_prob: float, version: str) -> None:
        self.token_ids.append(token)
        if self.return_logprob:
            self.output_log_probs.append(log_prob)
        count = len(self.token_ids) - self.prompt_len
        spans = self.version_spans
        if spans and spans[-1].version == version:
            spans[-1].end = count
        else:
            spans.append(VersionSpan(version=version, start=count - 1, end=count))
        self.finish = self._finish_by(token, count)

    def _finish_by(self, token: int, count: int) -> FinishReason | None:
        """The end that the token just appended brings; stop strings are looked at elsewhere."""
        params = self.params
        if (
            token in self.eos_ids or token in params.stop_token_ids
        ) and count > params.min_new_tokens:
            return FinishReason(kind="stop", matched=token)
        return FinishReason(kind="length") if count >= params.max_new_tokens else None
