"""Whether two answers are equal as mathematics: by their normal form, else by math-verify in a worker."""

from __future__ import annotations

import re
from collections import OrderedDict
from decimal import Decimal

from slime.rollout.rm_hub.exact_number import exact_number
from slime.rollout.rm_hub.workers import workers

TIME_LIMIT_S = 5.0
_LONGEST_ANSWER = 1000  # characters; nobody writes a gradable answer that long
_REMEMBERED = 4096
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\}| )\d{3})+(?:\.\d+)?")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|,|!|;|:| |quad|%|\$)"
    r"|\\(?:text|mathrm|mathbf|textbf|mbox)(?=\{)|[$%~]|(?<!\d)\s+|\s+(?!\d)"
)
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}$")


async def math_equal(answer: str, label: str, *, isolate: bool = True) -> bool:
    """Never raises on odd text, and takes no longer than the time limit once a worker is free and works."""
    if len(answer) > _LONGEST_ANSWER or len(label) > _LONGEST_ANSWER:
        return False
    left, right = normal_form(answer), normal_form(label)
    if not left or not right:
        return False
    if left == right:
        return True
    found, expected = exact_number(left), exact_number(right)
    if found is not None and expected is not None:
        return found == expected or _differ_by_percent(answer, found, label, expected)
    key = (_written_out(answer, found), _written_out(label, expected))
    if key not in _known:
        pool = workers("math_answers", time_limit_s=TIME_LIMIT_S, isolate=isolate)
        _known[key] = bool(await pool.ask([key[1], key[0]]))
        if len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    return _known.get(key, False)


def _differ_by_percent(answer: str, found: Decimal, label: str, expected: Decimal) -> bool:
    """Return whether one is a percentage and the other the fraction that it means: 50% and 0.5."""
    if ("%" in answer) == ("%" in label):
        return False
    return found == expected * 100 if "%" in answer else found * 100 == expected


def _written_out(text: str, value: Decimal | None) -> str:
    """Return `1e3` as 1000, since math-verify takes the e for a letter; other text as it is."""
    is_short = value is not None and abs(value.adjusted()) < 50
    return f"{value:f}" if is_short and "%" not in text else text


def normal_form(text: str) -> str:
    r"""`\dfrac{1}{2}\text{ cm}` and `\frac 12` alike: spacing, font, unit and size commands dropped."""
    text = text.strip().rstrip(".").strip()
    shorter = _UNITS.sub("", text)
    text = shorter if shorter.strip() else text
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree|°", "", text)
    text = text.replace("\\varnothing", "\\emptyset").replace("\u2212", "-")
    text = _DROPPED.sub("", text)
    if _THOUSANDS.fullmatch(text):
        text = re.sub(r"[{}, ]", "", text)
    return text.removeprefix("{").removesuffix("}") if re.fullmatch(r"\{[^{}]*\}", text) else text


_known: OrderedDict[tuple[str, str], bool] = OrderedDict()  # answer, label -> equal
