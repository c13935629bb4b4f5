"""The sampling parameters of a request: SGLang's `sampling_params`, validated once."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

# Parameters of SGLang that this engine does not support: refused by name, never ignored.
_UNSUPPORTED = {"stop_regex", "beam_width", "ebnf", "structural_tag", "custom_params"}
_HARMLESS = {"stream_interval"}
_SMALLEST_TEMPERATURE = 1e-6  # below it, as with SGLang, decoding is greedy
_LARGEST = 1e30  # a float32 that can still be divided by the smallest temperature
MOST_REQUESTS = 16384  # of one call: prompts times `n`
_MOST_STOPS = 64
_LONGEST_STOP = 1024  # bytes; up to that many tokens are decoded at every step to find it
LONGEST_CONSTRAINT = {"json_schema": 1 << 15, "regex": 1 << 12}  # characters


class RequestError(ValueError):
    """An invalid request; becomes HTTP 400 with this text.

    `plain`: the body is {"error": text} instead of {"error": {"message": text}}, as SGLang answers errors
    in sampling_params.
    """

    def __init__(self, message: str, *, plain: bool = False) -> None:
        super().__init__(message)
        self.plain = plain


@dataclass(kw_only=True, frozen=True)
class SamplingParams:
    """Temperature 0, or nearly 0, is greedy decoding; top_k -1 is the whole vocabulary."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    sampling_seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    json_schema: str | None = None  # JSON text, as SGLang has it
    regex: str | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < _SMALLEST_TEMPERATURE or self.top_k == 1

    @property
    def scale(self) -> float:
        """Return the divisor of the logits; greedy requests report the log-probs of temperature 1."""
        greedy = self.temperature < _SMALLEST_TEMPERATURE
        return 1.0 if greedy else min(self.temperature, _LARGEST)

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalized(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.logit_bias)
        )

    @property
    def constrained(self) -> bool:
        return self.json_schema is not None or self.regex is not None

    @cached_property
    def special(self) -> bool:
        """Return whether sampling needs more than a temperature."""
        return self.reshaped or self.min_new_tokens > 0

    @cached_property
    def reshaped(self) -> bool:
        """Return whether filters, penalties, biases or a constraint change the distribution."""
        return self.filtered or self.penalized or self.constrained

    @cached_property
    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and values of `logit_bias`, which may have an entry for every token."""
        count = len(self.logit_bias)
        tokens = np.fromiter(self.logit_bias.keys(), np.int64, count)
        return tokens, np.fromiter(self.logit_bias.values(), np.float32, count)


def parse_sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Parse a request's dictionary; RequestError names the first invalid key."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key in _UNSUPPORTED:
            if value is not None:
                raise RequestError(
                    f"sampling parameter `{key}` is not supported by this engine", plain=True
                )
        elif key in _READERS:
            if value is not None:
                values[key] = _READERS[key](key, value)
        elif key not in _HARMLESS:
            expected = ", ".join(f"`{name}`" for name in sorted(_READERS))
            raise RequestError(f"unknown field `{key}`, expected one of {expected}", plain=True)
    params = SamplingParams(**values)
    _check(params)
    return params


def _check(p: SamplingParams) -> None:
    _require(p.temperature >= 0.0, f"temperature must be non-negative, got {p.temperature}.")
    _require(0.0 < p.top_p <= 1.0, f"top_p must be in (0, 1], got {p.top_p}.")
    _require(0.0 <= p.min_p <= 1.0, f"min_p must be in [0, 1], got {p.min_p}.")
    _require(
        p.top_k == -1 or p.top_k >= 1, f"top_k must be -1 (disable) or at least 1, got {p.top_k}."
    )
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(p, name)
        _require(-2.0 <= value <= 2.0, f"{name} must be in [-2, 2], got {value}.")
    _require(
        0.0 < p.repetition_penalty <= 2.0,
        f"repetition_penalty must be in (0, 2], got {p.repetition_penalty}.",
    )
    _require(p.max_new_tokens >= 0, f"max_new_tokens must be at least 0, got {p.max_new_tokens}.")
    _require(
        0 <= p.min_new_tokens <= p.max_new_tokens,
        f"min_new_tokens must be in [0, max_new_tokens({p.max_new_tokens})], got {p.min_new_tokens}.",
    )
    _require(p.n >= 1, f"n must be at least 1, got {p.n}.")
    _require(p.n <= MOST_REQUESTS, f"n must be at most {MOST_REQUESTS}, got {p.n}.")
    _require(len(p.stop) <= _MOST_STOPS, f"stop has {len(p.stop)} strings, at most {_MOST_STOPS}.")
    _require(
        all(len(stop.encode("utf-8", "surrogatepass")) <= _LONGEST_STOP for stop in p.stop),
        f"a string of stop has more than {_LONGEST_STOP} bytes.",
    )
    _check_constraint(p)
    biases = p.logit_bias.values()
    _require(
        all(abs(bias) <= _LARGEST for bias in biases),
        f"logit_bias must be between {-_LARGEST:g} and {_LARGEST:g}, got {max(biases, key=abs, default=0)}.",
    )


def _check_constraint(p: SamplingParams) -> None:
    _require(
        p.json_schema is None or p.regex is None, "json_schema and regex are mutually exclusive."
    )
    for name, most in LONGEST_CONSTRAINT.items():
        size = len(getattr(p, name) or "")
        _require(size <= most, f"{name} has {size} characters, at most {most}.")
    _require(
        not p.constrained or not (p.ignore_eos or p.min_new_tokens),
        "json_schema and regex decide where a response ends: remove ignore_eos and min_new_tokens.",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)


def _wrong(key: str, value: object, wanted: str) -> RequestError:
    shown = reprlib.repr(value)  # of a deeply nested value `repr` would exceed the recursion limit
    return RequestError(f"sampling parameter `{key}` must be {wanted}, got {shown}", plain=True)


def _integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise _wrong(key, value, "an integer")
    return int(value)


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise _wrong(key, value, "a number")
    return float(value)


def _boolean(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(key, value, "a string")
    return value


def _strings(key: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise _wrong(key, value, "a non-empty string or a list of them")
    return tuple(items)


def _integers(key: str, value: object) -> frozenset[int]:
    items = value if isinstance(value, list) else [value]
    return frozenset(_integer(key, item) for item in items)


def _bias(key: str, value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _wrong(key, value, "a map from token id to bias")
    try:
        return {int(token): _number(key, bias) for token, bias in value.items()}
    except ValueError as error:
        raise _wrong(key, value, "a map from token id to bias") from error


_KINDS = {
    "int": _integer,
    "int | None": _integer,
    "float": _number,
    "bool": _boolean,
    "str | None": _text,
}
_SPECIAL = {"stop": _strings, "stop_token_ids": _integers, "logit_bias": _bias}
_READERS = {f.name: _SPECIAL.get(f.name) or _KINDS[str(f.type)] for f in fields(SamplingParams)}
