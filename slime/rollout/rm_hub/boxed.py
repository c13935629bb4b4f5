r"""The text inside the last \boxed{} of a text."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed ")
_SEARCHED = 20_000  # characters at the end of a response in which its answer is looked for
_BARE = re.compile(r"[^\s$]+")


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} (or \fbox{...}, \boxed x) holds; None without one, or unbalanced."""
    tail = text[-_SEARCHED:]
    boxes = list(_BOX.finditer(tail))
    if not boxes:
        return None
    start = boxes[-1].end()
    if tail[start : start + 1] != "{":
        bare = _BARE.match(tail, start)
        return bare[0] if bare else None
    depth = 0
    for position in range(start, len(tail)):
        depth += {"{": 1, "}": -1}.get(tail[position], 0)
        if depth == 0:
            return tail[start + 1 : position].strip()
    return None
