"""Whether two answers are equal as mathematics: by their normal form, else by math-verify in a worker."""

from __future__ import annotations

import re
from collections import OrderedDict

from slime.rollout.rm_hub.workers import workers

TIME_LIMIT_S = 5.0
_LONGEST_ANSWER = 1000  # characters; nobody writes a gradable answer that long
_REMEMBERED = 4096
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|,|!|;|:| |quad|%|\$)"
    r"|\\(?:text|mathrm|mathbf|textbf|mbox)(?=\{)|[$%~]|(?<!\d)\s+|\s+(?!\d)"
)
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}$")


async def math_equal(answer: str, label: str, *, isolate: bool = True) -> bool:
    """Never raises on odd text, and takes no longer than the time limit once a worker is free and works."""
    left, right = normal_form(answer), normal_form(label)
    if not left or not right or len(answer) > _LONGEST_ANSWER or len(label) > _LONGEST_ANSWER:
        return False
    if left == right:
        return True
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return float(left) == float(right)
    key = (answer, label)
    if key not in _known:
        pool = workers("math_answers", time_limit_s=TIME_LIMIT_S, isolate=isolate)
        _known[key] = bool(await pool.ask([label, answer]))
        if len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    return _known.get(key, False)


def normal_form(text: str) -> str:
    r"""`\dfrac{1}{2}\text{ cm}` and `\frac 12` alike: spacing, font, unit and size commands dropped."""
    text = text.strip().rstrip(".").strip()
    shorter = _UNITS.sub("", text)
    text = shorter if shorter.strip() else text
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree", "", text)
    text = _DROPPED.sub("", text)
    if _THOUSANDS.fullmatch(text):
        text = re.sub(r"[{},]", "", text)
    return text.removeprefix("{").removesuffix("}") if re.fullmatch(r"\{[^{}]*\}", text) else text


_known: OrderedDict[tuple[str, str], bool] = OrderedDict()  # answer, label -> equal
