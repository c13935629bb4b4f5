r"""`--rm-grading strict`: `math`, `deepscaler` and `dapo` as published, so that reward curves can be compared.

math: equal in the normal form of MATH (Hendrycks et al. 2021, arXiv:2103.03874), or in that of PRM800K
(Lightman et al. 2023, arXiv:2305.20050), where sympy compares element by element and fractions must be reduced.
dapo: equal in the normal form of Minerva (Lewkowycz et al. 2022, arXiv:2206.14858), which DAPO uses.
Quirks of those graders are kept: `\frac{x+1}{2}` reads as x+1/2, and -1\frac12 as -1+1/2.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

from slime.core.types import Sample
from slime.rollout.base_types import RewardArgs
from slime.rollout.rm_hub.math_reward import in_braces
from slime.rollout.rm_hub.workers import isolated, workers

TIME_LIMIT_S = 5.0
_MAX_ANSWER_CHARS = 1000
_TAIL_CHARS = 20_000  # end of a response that is searched for \boxed{}
_MAX_NESTING = 50  # of braces; deeper text is compared as it is

_MATH_REMOVED = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_SQRT = re.compile(r"\\sqrt(?!\{)(.)")
_FRAC = re.compile(r"\\frac(?!\{)(.)(?:([^{])|(?=\{))")
_ONE_FRACTION = re.compile(r"(-?\d+)/(-?\d+)")

_UNITS = re.compile(
    "(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)"
    r"(?:es)?s? *(?:\^[0-9]+)?"
)
_POWERS = {"trillion": "*10^12", "billion": "*10^9", "million": "*10^6"}
_GROUPING_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MIXED = re.compile("(?<=[0-9]) +(?=[0-9])")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_HARD_POWER = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")
_BRACKETS = "()[]"
_LATEX = re.compile(r"\\[A-Za-z]+|\\.|[{}]|[^\\{}]", re.DOTALL)
_SYMBOLS = {
    "\\pi": "pi", "\\infty": "inf", "\\cup": "U", "\\cdot": "*", "\\times": "*", "\\{": "{", "\\}": "}",
    "\\ ": " ", "\\,": " ", "\\;": " ", "\\:": " ", "\\quad": " ", "\\qquad": " ", "~": " ", "\\%": "%",
    **dict.fromkeys(
        ("\\!", "\\left", "\\right", "\\text", "\\textbf", "\\textit", "\\mathrm", "\\mathbf", "\\mathit",
         "\\mathbb", "\\mbox", "\\displaystyle", "\\operatorname", "\\big", "\\Big"), ""),
}  # fmt: skip

_DAPO_TAIL_CHARS = 300  # end of a response that is searched for "Answer:"
_BOX_TAIL_CHARS = 100  # the same, for the \boxed{} of strict_box
_ANSWER = re.compile(r"(?i)answer\s{0,16}:\s{0,16}([^\n]+)")
_NO_ANSWER = "[INVALID]"
_MINERVA_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals",
    "edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}",
    "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;",
    ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip


async def math(args: RewardArgs, sample: Sample) -> float:
    return await grade_math(sample.response, sample.label, isolate=isolated(args))


async def deepscaler(args: RewardArgs, sample: Sample) -> float:
    return await grade_deepscaler(sample.response, sample.label, isolate=isolated(args))


async def dapo(args: RewardArgs, sample: Sample) -> dict[str, Any]:
    return grade_dapo(sample.response, sample.label)


async def dapo_box(args: RewardArgs, sample: Sample) -> dict[str, Any]:
    return grade_dapo(sample.response, sample.label, strict_box_verify=True)


async def grade_math(response: str, label: object, *, isolate: bool = True) -> float:
    expected = "" if label is None else str(label)
    if "\\boxed" in expected:
        expected = boxed(expected) or ""
    answer = boxed(response)
    if not answer or not expected:
        return 0.0
    return float(await math_equal(answer, expected, isolate=isolate))


async def grade_deepscaler(response: str, label: object, *, isolate: bool = True) -> float:
    """Grade what follows the last `</think>`, else the part behind the first `###Response`."""
    if "</think>" in response:
        part = response.rsplit("</think>", 1)[1]
    elif "###Response" in response:
        part = response.split("###Response", 2)[1]
    else:
        return 0.0
    return await grade_math(part, label, isolate=isolate)


def grade_dapo(response: str, label: object, *, strict_box_verify: bool = False) -> dict[str, Any]:
    r"""Compare the last "Answer:" line, or with `strict_box_verify` the last \boxed{} as it is written."""
    tail, expected = response[-_DAPO_TAIL_CHARS:], {_dapo_label(label)}
    if strict_box_verify:
        expected.add(str(label).strip())
        pred = boxed(tail[-_BOX_TAIL_CHARS:])
    else:
        found = _ANSWER.findall(tail)
        pred = minerva_form(found[-1]) if found else None
    correct = bool(pred) and label is not None and pred in expected
    return {
        "score": 1.0 if correct else -1.0,
        "acc": correct,
        "pred": _NO_ANSWER if pred is None else pred,
    }


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}; None if missing, unbalanced or without braces."""
    tail = text[-_TAIL_CHARS:]
    start = tail.rfind("\\boxed")
    if start < 0 or not tail.startswith("\\boxed{", start):
        return None
    return in_braces(tail, start + len("\\boxed"))


async def math_equal(answer: str, label: str, *, isolate: bool = True) -> bool:
    """Return whether two answers are equal by MATH's or PRM800K's rules."""
    if len(answer) > _MAX_ANSWER_CHARS or len(label) > _MAX_ANSWER_CHARS:
        return False
    if math_form(answer) == math_form(label):
        return True
    found, expected = sympy_form(answer), sympy_form(label)
    if found == expected:
        return True
    if not found or not expected:
        return False
    found_elements, expected_elements = elements(found), elements(expected)
    if len(found_elements) != len(expected_elements):
        return False
    if len(expected_elements) > 1 and (found[0], found[-1]) != (expected[0], expected[-1]):
        return False
    for pair in zip(found_elements, expected_elements, strict=True):
        if not await _equal_elements(*pair, isolate=isolate):
            return False
    return True


async def _equal_elements(found: str, expected: str, *, isolate: bool) -> bool:
    """Let sympy compare, but neither two fractions (which must be reduced) nor an integer with other text."""
    if _FRACTION.fullmatch(found) and _FRACTION.fullmatch(expected):
        return found == expected
    if (_integer(found) is None) != (_integer(expected) is None):
        return False
    letters = re.sub("sqrt|frac", "", found + expected)
    if len({letter for letter in letters if letter.isalpha()}) > 2:
        return False
    if _HARD_POWER.search(found) or _HARD_POWER.search(expected):
        return False
    pool = workers("strict_math_answers", time_limit_s=TIME_LIMIT_S, isolate=isolate)
    return bool(await pool.ask([expected, found]))


def math_form(answer: str) -> str:
    r"""Return the normal form of MATH: `\dfrac12` becomes `\frac{1}{2}`, `x = 5` becomes `5`."""
    text = whole = _without_text(answer.strip())
    for part in _MATH_REMOVED:
        text = text.replace(part, "")
    text = text.replace("\\\\", "\\").replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    if text.count("\\text{ ") > 1:
        return whole
    text = text.split("\\text{ ")[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    text = _SQRT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = _FRAC.sub(lambda m: f"\\frac{{{m[1]}}}" + (f"{{{m[2]}}}" if m[2] else ""), text)
    if text == "0.5":
        return "\\frac{1}{2}"
    fraction = _ONE_FRACTION.fullmatch(text)
    return f"\\frac{{{fraction[1]}}}{{{fraction[2]}}}" if fraction else text


def sympy_form(answer: str) -> str:
    r"""Return the normal form of PRM800K, which sympy can read: `1 \frac12` becomes `1+1/2`."""
    text = _without_text(answer)
    for part in ("\\%", "\\$", "$", "%"):
        text = text.replace(part, "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in _POWERS.items():
        text = text.replace(word, power)
    text = re.sub(r"\^ *\\circ", "", _UNITS.sub("", text))
    if text[:1] == "{" and text[-1:] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (number := _integer(text)) is not None:
        text = str(number)
    if "\\" in text:
        text = latex_text(text).strip()
    text = _MIXED.sub("+", re.sub("- *", "-", text))
    text = re.sub("[ {}]", "", text).lower()
    number = _integer(text)
    return text if number is None else str(number)


def elements(text: str) -> list[str]:
    """Return the elements of a tuple or an interval; the whole text if it is neither."""
    text = _GROUPING_COMMA.sub("", text)
    inner = text[1:-1]
    is_tuple = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if is_tuple and not any(bracket in inner for bracket in _BRACKETS):
        return [element.strip() for element in inner.split(",")]
    return [text]


def latex_text(text: str) -> str:
    r"""Return LaTeX as plain text: `\frac{1}{2}` as 1/2 and `\sqrt{2}` as sqrt(2), unknown macros as they are."""
    text = re.sub(r"\\[td]?frac(?![A-Za-z])", r" \\frac", text)
    try:
        return _read(deque(_LATEX.findall(text)), 0)
    except (IndexError, RecursionError):  # arguments are missing, or too deep
        return text


def _read(tokens: deque[str], depth: int) -> str:
    """Return the text up to the brace that closes this group."""
    if depth > _MAX_NESTING:
        raise RecursionError
    parts = []
    while tokens and (token := tokens.popleft()) != "}":
        parts.append(_convert(token, tokens, depth))
    return "".join(parts)


def _convert(token: str, tokens: deque[str], depth: int) -> str:
    if token == "{":
        return _read(tokens, depth + 1)
    if token == "\\frac":
        return f"{_argument(tokens, depth)}/{_argument(tokens, depth)}"
    if token == "\\sqrt":
        if tokens[0] == "[":  # the degree, which the published grader drops
            while tokens.popleft() != "]":
                pass
        return f"sqrt({_argument(tokens, depth)})"
    return _SYMBOLS.get(token, token)


def _argument(tokens: deque[str], depth: int) -> str:
    if depth > _MAX_NESTING:
        raise RecursionError
    while tokens[0].isspace():
        tokens.popleft()
    return _convert(tokens.popleft(), tokens, depth + 1)


def minerva_form(answer: str) -> str:
    r"""Return the normal form of Minerva: `$\boxed{1,024}$ cm` becomes `1024`."""
    text = answer.split("=")[-1]
    for old, new in _MINERVA_REPLACED:
        text = text.replace(old, new)
    for part in _MINERVA_REMOVED:
        text = text.replace(part, "")
    if text.count("$") > 1:
        text = text.split("$")[1]
    for macro in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{macro}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


def _dapo_label(label: object) -> str:
    """Return an integer as its digits, other labels in Minerva's normal form; empty if too long."""
    text = "" if label is None else str(label).strip()
    if len(text) > _DAPO_TAIL_CHARS:
        return ""
    if re.fullmatch(r"[-+]?\d+(?:\.0*)?", text):
        return str(int(text.split(".")[0]))
    return minerva_form(text)


def _without_text(text: str) -> str:
    found = re.fullmatch(r"\\text\{(.+?)\}", text)
    return found[1] if found else text


def _integer(text: str) -> int | None:
    """Return the integer that the text is within 1e-7, as a float reads it; None for other text."""
    try:
        number = float(_GROUPING_COMMA.sub("", text))
        return round(number) if abs(number - round(number)) <= 1e-7 else None
    except (ValueError, OverflowError):
        return None
