"""The state of one request in the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime.engine.scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slime.engine.lora.store import Adapter
    from slime.engine.scheduler.constraint import Constraint
    from slime.engine.scheduler.prompt_images import PromptImages
    from slime.engine.scheduler.speculation import DraftHistory


@dataclass(frozen=True, kw_only=True)
class FinishReason:
    """Why generation ended: "stop" (a token or string matched), "length" or "abort"."""

    kind: str
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None  # of an abort that must become an HTTP error


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Output tokens start..end (end exclusive) were sampled with weights of this version."""

    version: str
    start: int
    end: int


@dataclass(kw_only=True, eq=False)
class Request:
    """`token_ids` is the prompt followed by the output; the keys and values of `num_computed` of them are
    in the cache, in `pages` in order. `num_pending` more were sampled on the device and are not known yet.

        prompt [5, 9, 5], two tokens generated, the second not yet run through the model::

            token_ids = [5, 9, 5, 7, 6]     prompt_len = 3     num_computed = 4     num_pending = 0

        the same while the device computes the third::

            token_ids = [5, 9, 5, 7, 6]     prompt_len = 3     num_computed = 5     num_pending = 1
    """

    # given
    rid: str
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()  # empty with ignore_eos
    return_logprob: bool = False
    num_top_log_probs: int = 0  # most likely tokens to return for each output token
    constraint: Constraint | None = None  # which tokens may follow; None: all
    return_routed_experts: bool = False
    logprob_start_len: int = -1  # -1: no log-probs of the prompt
    stream: bool = False
    adapter: Adapter | None = None  # None: base model only
    images: PromptImages | None = None  # None: text only
    arrival: float = field(default_factory=time.perf_counter)
    # kept by the scheduler
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache when first admitted
    num_retractions: int = 0
    row: int = -1  # row of the page table while running
    # Epoch of the prefix cache and cache key of the adapter when the request started.
    cache_epoch: tuple[int, int] = (-1, 0)
    # With recurrent layers: tokens whose pages the prefix cache had at the start, and a saved state as
    # (row, number of tokens before it).
    branch_point: int = 0
    saved_state: tuple[int, int] | None = None
    draft_history: DraftHistory | None = None  # set by the first decoding step with drafts
    # filled in step by step
    output_log_probs: list[float] = field(default_factory=list)
    input_log_probs: list[float] = field(default_factory=list)
    # (token, log-prob) of the most likely ones for each output token
    top_log_probs: list[list[tuple[int, float]]] = field(default_factory=list)
    # (version, first output token)
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    finish: FinishReason | None = None
    routed_experts: str | None = None  # encoded, once finished

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Return how many tokens must be computed before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def cache_key(self) -> int:
        """Return the namespace of its prefixes in the cache: one per adapter version, 0 for the base."""
        return 0 if self.adapter is None else self.adapter.cache_key

    @property
    def cache_ids(self) -> list[int]:
        """Return its tokens as prefix cache keys: token ids, or content hashes at image tokens."""
        if self.images is None:
            return self.token_ids
        return self.images.keys + self.output_ids

    @property
    def rope_delta(self) -> int:
        """Return RoPE position minus index for tokens after the prompt."""
        return 0 if self.images is None else self.images.delta

    @property
    def version_spans(self) -> list[VersionSpan]:
        if not self.version_starts:
            return []
        ends = [start for _, start in self.version_starts[1:]] + [self.num_output]
        return [
            VersionSpan(version=version, start=start, end=end)
            for (version, start), end in zip(self.version_starts, ends, strict=True)
        ]

    def append(self, token: int, log_prob: float, version: str) -> None:
        token_ids, starts, params = self.token_ids, self.version_starts, self.params
        count = len(token_ids) - self.prompt_len + 1
        if count > params.max_new_tokens:  # max_new_tokens is 0
            self.finish = FinishReason(kind="length")
            return
        token_ids.append(token)
        if self.return_logprob:
            self.output_log_probs.append(log_prob)
        if not starts or starts[-1][0] != version:
            starts.append((version, count - 1))
        ends = token in self.eos_ids or token in params.stop_token_ids
        if ends and count > params.min_new_tokens:  # stop strings are checked elsewhere
            self.finish = FinishReason(kind="stop", matched=token)
        elif count == params.max_new_tokens:
            self.finish = FinishReason(kind="length")
        if self.constraint is not None and self.constraint.error:
            message = f"the constraint cannot be followed: {self.constraint.error}"
            self.finish = FinishReason(kind="abort", message=message, status_code=400)
