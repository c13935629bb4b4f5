"""Constrained decoding: which tokens may follow under a JSON schema or a regular expression, by llguidance.

    "{" generated so far  ──▶  allowed: '"', "}" if nothing is required, whitespace  ──▶  all other logits: -inf

Schemas come from clients. llguidance compiles them without backtracking, fetches nothing, and bounds memory and
time of a grammar and of each token (`_LIMITS`); exceeding a limit fails the request.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.engine.scheduler.sampling_params import RequestError, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A fifth of llguidance's defaults: the slowest token of (a{1000}){1000} takes 0.3 s instead of 3.6 s.
_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# They override a schema's own "x-guidance": whitespace is bounded, and unknown keywords are errors.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{1,32}", "lenient": False}
_ERROR_CHARS = 200


class Constraints:
    """Makes the constraints of one model; construction converts its tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        self._library = _llguidance()
        ends = sorted(token for token in eos_ids if token < vocab_size)
        if not ends:
            raise RequestError("constrained decoding needs a model with an end token")
        try:
            convert = importlib.import_module("llguidance.hf").from_tokenizer
            self._tokenizer = convert(tokenizer, n_vocab=vocab_size, eos_token=ends)
        except Exception as error:  # llguidance does not support this tokenizer
            raise RequestError(f"constrained decoding: {_first_line(error)}") from error

    def make(self, params: SamplingParams) -> Constraint:
        library = self._library.LLMatcher
        limits = self._library.LLParserLimits(**_LIMITS)
        if params.regex is not None:
            grammar = library.grammar_from_regex(params.regex)
        else:
            try:
                grammar = library.grammar_from_json_schema(
                    params.json_schema, overrides=_JSON_OPTIONS
                )
            except ValueError as error:
                raise RequestError(f"json_schema: {_first_line(error)}") from None
        matcher = library(self._tokenizer, grammar, log_level=0, limits=limits)
        # The first mask takes up to a second for a hostile grammar: compute it here, not in the engine thread.
        matcher.compute_bitmask()
        if matcher.is_error():
            name = "json_schema" if params.regex is None else "regex"
            raise RequestError(f"{name}: {_first_line(matcher.get_error())}")
        return Constraint(matcher)


class Constraint:
    """The state of one response: the tokens of the output that the grammar has consumed."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_consumed = 0
        self.error = ""  # why decoding can no longer follow it

    def copy(self) -> Constraint:
        """Return the same constraint for another response; none of its tokens are consumed."""
        return Constraint(self._matcher.deep_copy())

    def allowed(self, output_ids: Sequence[int], vocab_size: int) -> np.ndarray:
        """Return [V] bool: which tokens may follow the output; all of them after an error."""
        self._matcher.consume_tokens(list(output_ids[self._num_consumed :]))
        self._num_consumed = len(output_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(vocab_size, bool)
        known = np.unpackbits(bits, bitorder="little")[:vocab_size]
        allowed[: len(known)] = known
        if self._matcher.is_error() or not allowed.any():
            self.error = _first_line(self._matcher.get_error() or "no token may follow")
            allowed[:] = True
        return allowed


def _llguidance() -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise RequestError(
            "response_format, json_schema and regex need llguidance on the engine's machine: "
            "pip install 'slime[constrained]'"
        ) from None


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines() or ["unknown"]
    return lines[0][:_ERROR_CHARS]
