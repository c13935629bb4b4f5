"""Plainly written numbers, by their exact value."""

from __future__ import annotations

import re
from decimal import Decimal

_LONGEST = 1000  # characters
_GROUPS = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?:\{,\}\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_NUMBER = re.compile(
    r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))"
    r"(?:[eE]([-+]?\d{1,4})|(?:\\times|\\cdot|\*|\u00d7|\u00b7|x)10(?:\^|\*\*)(?:([-+]?\d{1,4})|\{([-+]?\d{1,4})\}))?"
)


def exact_number(text: str) -> Decimal | None:
    r"""Return the value of `-1.5`, `1,000`, `1 000`, `1e3` or `1.5\times10^{3}`; None for other text.

    White space around `\times` and the like must be removed before.
    """
    text = text.strip()
    if not text or len(text) > _LONGEST:
        return None
    text = text.replace("\u2212", "-")  # the minus sign of typesetting
    if _GROUPS.fullmatch(text):
        text = re.sub(r"[{}, ]", "", text)
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    exponent = found[2] or found[3] or found[4] or "0"
    return Decimal(f"{found[1]}E{int(exponent)}")
