"""The requirements in slime's own package metadata, as text a user can give to pip."""

from __future__ import annotations

import operator
import re
from functools import cache
from importlib import metadata

_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def requirement_of(package: str) -> str:
    """Return e.g. `torch<2.14,>=2.11`, extras included; the bare name if slime has no requirement."""
    return _requirements().get(package, package)


def allows(requirement: str, version: str) -> bool:
    """Return whether a version satisfies a requirement; build suffixes such as +cu130 are ignored."""
    installed = _release(version)
    return all(
        _COMPARE[sign](installed, _release(bound))
        for sign, bound in re.findall(r"([<>=!]=|[<>])\s*([\w.]+)", requirement)
    )


@cache
def _requirements() -> dict[str, str]:
    try:
        listed = metadata.requires("slime") or []
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        listed = []
    parts = [entry.split(";")[0].strip() for entry in listed]
    return {re.split(r"[\[<>=!~ ]", part, maxsplit=1)[0].lower(): part for part in parts}


def _release(version: str) -> tuple[int, ...]:
    """Return (2, 13, 0, 0) for "2.13.0+cpu" and for "2.13"."""
    numbers = [int(n) for n in re.match(r"[\d.]*", version)[0].split(".") if n]  # type: ignore[index]
    return tuple([*numbers, 0, 0, 0, 0][:4])
