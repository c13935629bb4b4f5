"""How a file of prompts is written on the command line; kept apart so that parsing stays light."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from slime.core.errors import ConfigError

_SPEC = re.compile(
    r"(?P<path>.*?)(?:@\[(?P<start>-?\d*):(?P<stop>-?\d*)\])?(?::weight=(?P<weight>[^:]*))?"
)

_TASK = "reasoning-gym:"


@dataclass(kw_only=True, frozen=True)
class DataSpec:
    """`train.jsonl@[0:100]:weight=2` is path="train.jsonl", rows=slice(0, 100), weight=2.0."""

    path: str
    rows: slice = field(default_factory=lambda: slice(None))
    weight: float = 1.0

    @property
    def task(self) -> str | None:
        """`leg_counting` of `reasoning-gym:leg_counting`; None for a file."""
        return self.path.removeprefix(_TASK) if self.path.startswith(_TASK) else None

    @classmethod
    def parse(cls, text: str, flag: str = "--prompt-data") -> DataSpec:
        match = _SPEC.fullmatch(text)
        path = match["path"] if match else ""
        if not match or path in ("", _TASK) or re.search(r"@\[.*\]$", path):
            raise ConfigError(
                f"{flag} {text}: write a path or reasoning-gym:<task>, with @[0:100] or :weight=2"
            )
        return cls(
            path=path, rows=_parse_slice(match), weight=_parse_weight(match["weight"], flag, text)
        )


def _parse_slice(match: re.Match[str]) -> slice:
    if match["start"] is None:
        return slice(None)
    start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
    return slice(start, stop)


def _parse_weight(text: str | None, flag: str, spec: str) -> float:
    if text is None:
        return 1.0
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < 1e6:
        raise ConfigError(f"{flag} {spec}: weight must be a number above 0, not {text!r}")
    return weight
