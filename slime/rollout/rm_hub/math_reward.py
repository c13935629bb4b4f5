r"""`--rm-type math` and `deepscaler`: the last \boxed{} of the response against the label, 1 or 0.

Two answers are equal if their normal forms or their exact numeric values are; otherwise math-verify decides,
in a worker process. `--rm-type dapo`: the last "Answer: ..." line against an integer label, 1 or -1.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from decimal import Decimal
from typing import Any

from slime.core.types import Sample
from slime.rollout.base_types import RewardArgs
from slime.rollout.rm_hub.workers import isolated, workers

TIME_LIMIT_S = 5.0
_MAX_ANSWER_CHARS = 1000
_MAX_NUMBER_CHARS = 1000
_MAX_CACHED = 4096
_TAIL_CHARS = 20_000  # end of a response that is searched for \boxed{}
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed ")
_BARE = re.compile(r"[^\s$]+")
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:(?:,\d{3})+|(?:\{,\}\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_NUMBER = re.compile(
    r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))"
    r"(?:[eE]([-+]?\d{1,4})|(?:\\times|\\cdot|\*|\u00d7|\u00b7|x)10(?:\^|\*\*)(?:([-+]?\d{1,4})|\{([-+]?\d{1,4})\}))?"
)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\}| )\d{3})+(?:\.\d+)?")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|,|!|;|:| |quad|%|\$)"
    r"|\\(?:text|mathrm|mathbf|textbf|mbox)(?=\{)|[$%~]|(?<!\d)\s+|\s+(?!\d)"
)
_MIXED = re.compile(
    r"(?<![\d.,/^_])(\d{1,9})(?:\s|\\[ ,;:]|~){1,8}([1-9]\d{0,8})/([1-9]\d{0,8})(?![\d.^])"
)
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}$")

_DAPO_TAIL_CHARS = 300  # end of a response that is searched for "Answer:" by dapo
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_NO_ANSWER = "[INVALID]"
_UNIT_NAMES = (
    "degrees?|cm|mm|km|centimeters?|meters?|miles?|inches|inch|feet|foot|units?|square|cubic|dollars?|"
    "cents?|points?|minutes?|hours?|days?|weeks?|months?|years?|seconds?|percent|edges|sq|mph|"
    "kmph|ft|m|s|h|p\\.m\\.|a\\.m\\."
)
_TRAILING_UNITS = re.compile(
    rf"(?<=[\d\s}}$])\s*(?:{_UNIT_NAMES})(?:\s+(?:{_UNIT_NAMES}))*\s*$", re.IGNORECASE
)


async def math(args: RewardArgs, sample: Sample) -> float:
    return await grade_math(sample.response, sample.label, isolate=isolated(args))


async def deepscaler(args: RewardArgs, sample: Sample) -> float:
    return await grade_deepscaler(sample.response, sample.label, isolate=isolated(args))


async def dapo(args: RewardArgs, sample: Sample) -> dict[str, Any]:
    return grade_dapo(sample.response, sample.label)


async def grade_math(response: str, label: object, *, isolate: bool = True) -> float:
    answer, expected = last_boxed(response), label_text(label)
    if not answer or not expected:
        return 0.0
    return float(await math_equal(answer, expected, isolate=isolate))


async def grade_deepscaler(response: str, label: object, *, isolate: bool = True) -> float:
    """Grade only what follows the thinking part; a response without one scores 0."""
    for marker in ("</think>", "###Response"):
        if marker in response:
            return await grade_math(response.rsplit(marker, 1)[1], label, isolate=isolate)
    return 0.0


def grade_dapo(response: str, label: object) -> dict[str, Any]:
    found = _ANSWER.findall(response[-_DAPO_TAIL_CHARS:])
    pred = dapo_answer(found[-1]) if found else _NO_ANSWER
    expected = "" if label is None else str(label)
    correct = (
        bool(found)
        and len(expected) <= _DAPO_TAIL_CHARS
        and _same_integer(pred, dapo_answer(expected))
    )
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def dapo_answer(text: str) -> str:
    r"""Return the bare answer: `$\boxed{1{,}024}$ cm.` becomes `1024`."""
    text = re.sub(r"<\|[^|]*\|>", "", text)  # an end-of-turn token left in the text
    text = text.split("=")[-1]
    text = re.sub(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|overline)\s*\{", "{", text)
    text = re.sub(r"\\(?:left|right|displaystyle|,|!|;|:| |%|\$)", "", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree", "", text)
    text = text.replace("$", "").replace("*", "").strip().rstrip(".").strip()
    text = re.sub(r"\{,\}|(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"[{}]", "", text) if re.fullmatch(r"[{}\s\d\w.+-]*", text) else text
    text = _TRAILING_UNITS.sub("", text)
    return re.sub(r"\s+", "", text).rstrip("%")


def label_text(label: object) -> str:
    r"""Return the label as text, without the \boxed{} around it if there is one."""
    text = "" if label is None else str(label).strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, \fbox{...} or \boxed x; None if missing or unbalanced."""
    tail = text[-_TAIL_CHARS:]
    boxes = list(_BOX.finditer(tail))
    if not boxes:
        return None
    start = boxes[-1].end()
    if tail[start : start + 1] != "{":
        bare = _BARE.match(tail, start)
        return bare[0] if bare else None
    content = in_braces(tail, start)
    return None if content is None else content.strip()


def in_braces(text: str, start: int) -> str | None:
    """Return the text between the brace at `start` and the one that closes it; None if none does."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position]
    return None


async def math_equal(answer: str, label: str, *, isolate: bool = True) -> bool:
    """Return whether two answers are equal as mathematics; text that cannot be parsed is not equal."""
    if len(answer) > _MAX_ANSWER_CHARS or len(label) > _MAX_ANSWER_CHARS:
        return False
    answer, label = mixed_numbers(answer), mixed_numbers(label)
    left, right = normal_form(answer), normal_form(label)
    if not left or not right:
        return False
    if left == right:
        return True
    found, expected = exact_number(left), exact_number(right)
    if found is not None and expected is not None:
        return found == expected or _differ_by_percent(answer, found, label, expected)
    key = (_without_exponent(answer, found), _without_exponent(label, expected))
    if key not in _cache:
        pool = workers("math_answers", time_limit_s=TIME_LIMIT_S, isolate=isolate)
        equal = await pool.ask([key[1], key[0]])
        if equal is None:  # too slow, or the workers were lost: another time it may be decided
            return False
        _cache[key] = bool(equal)
        if len(_cache) > _MAX_CACHED:
            _cache.popitem(last=False)
    return _cache.get(key, False)


def exact_number(text: str) -> Decimal | None:
    r"""Return the value of `-1.5`, `1,000`, `1 000`, `1e3` or `1.5\times10^{3}`; None for other text.

    White space around `\times` and the like must have been removed.
    """
    text = text.strip()
    if not text or len(text) > _MAX_NUMBER_CHARS:
        return None
    text = text.replace("\u2212", "-")  # the typographic minus sign
    if _GROUPED_NUMBER.fullmatch(text):
        text = re.sub(r"[{}, ]", "", text)
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    exponent = found[2] or found[3] or found[4] or "0"
    return Decimal(f"{found[1]}E{int(exponent)}")


def mixed_numbers(text: str) -> str:
    r"""Write `1 1/2` as `1\frac{1}{2}`, the only form in which math-verify reads one and a half."""
    return _MIXED.sub(
        lambda found: (
            rf"{found[1]}\frac{{{found[2]}}}{{{found[3]}}}"
            if int(found[2]) < int(found[3])
            else found[0]
        ),
        text,
    )


def normal_form(text: str) -> str:
    r"""Drop spacing, font, unit and size commands: `\dfrac{1}{2}\text{ cm}` and `\frac 12` become equal."""
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


def _same_integer(pred: str, label: str) -> bool:
    found, expected = exact_number(pred), exact_number(label)
    if found is None or expected is None:
        return bool(label) and pred == label
    return found == expected == expected.to_integral_value()


def _differ_by_percent(answer: str, found: Decimal, label: str, expected: Decimal) -> bool:
    """Return whether one is a percentage and the other the same value as a fraction: 50% and 0.5."""
    if ("%" in answer) == ("%" in label):
        return False
    return found == expected * 100 if "%" in answer else found * 100 == expected


def _without_exponent(text: str, value: Decimal | None) -> str:
    """Return `1e3` as 1000, since math-verify reads the e as a variable; other text unchanged."""
    is_short = value is not None and abs(value.adjusted()) < 50
    return f"{value:f}" if is_short and "%" not in text else text


_cache: OrderedDict[tuple[str, str], bool] = OrderedDict()  # (answer, label) -> equal
