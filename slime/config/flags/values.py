"""Convert text or YAML to the value of a flag, and find the nearest known name."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from slime.config.flags.spec import Flag
from slime.core.errors import ConfigError

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "json": "JSON",
    "size": "a whole number, or one with k, M, G (1000s) or Ki, Mi, Gi (1024s)",
}
_SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def convert(flag: Flag, raw: Any, where: str) -> Any:
    """Convert `raw`, a string of the command line or a YAML value, to the type of `flag`.

    `where` is the location in messages: "--lr", or "run.yaml: lr".
    """
    if flag.many:
        items = raw if isinstance(raw, list) else [raw]
        return [_convert_one(flag, item, where) for item in items]
    return _convert_one(flag, raw, where)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the only known name that starts with `name`, else the most similar one, or None."""
    known = list(known)
    begun = [other for other in known if other.startswith(name)]
    matches = begun if len(begun) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def _convert_one(flag: Flag, raw: Any, where: str) -> Any:
    try:
        value = _READERS[flag.kind](raw)
    except (ValueError, TypeError) as error:
        hint = f": {error}" if flag.kind == "json" else ""
        raise ConfigError(
            f"{where}: {_shown(flag, raw)} is not {_WANTED[flag.kind]}{hint}"
        ) from None
    if flag.choices and value not in flag.choices:
        near = nearest(str(value), [str(choice) for choice in flag.choices])
        listed = ", ".join(str(choice) for choice in flag.choices)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{where}: {_shown(flag, raw)} is not one of {listed}{hint}")
    return value


def _shown(flag: Flag, raw: Any) -> str:
    return "the value" if flag.secret else repr(raw)


def _read_int(raw: Any) -> int:
    if isinstance(raw, bool) or (isinstance(raw, float) and raw != int(raw)):
        raise ValueError
    return int(raw)


def _read_float(raw: Any) -> float:
    if isinstance(raw, bool):
        raise ValueError
    value = float(raw)
    if value != value:
        raise ValueError
    return value


def _read_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if str(raw).lower() not in ("true", "false"):
        raise ValueError
    return str(raw).lower() == "true"


def _read_str(raw: Any) -> str:
    if isinstance(raw, list | dict | bool) or raw is None:
        raise ValueError
    return str(raw)


def _read_json(raw: Any) -> Any:
    return json.loads(raw) if isinstance(raw, str) else raw


def _read_size(raw: Any) -> int:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti|)", str(raw).strip())
    if not match:
        raise ValueError
    number = float(match[1]) * _SIZES[match[2]]
    if number != int(number):
        raise ValueError
    return int(number)


_READERS = {
    "int": _read_int,
    "float": _read_float,
    "bool": _read_bool,
    "str": _read_str,
    "json": _read_json,
    "size": _read_size,
}
