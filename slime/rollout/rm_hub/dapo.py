"""`--rm-type dapo`: the last "Answer: ..." line in the last 300 characters against an integer label."""

from __future__ import annotations

import re
from typing import Any

from slime.core.types import Sample
from slime.rollout.rm_hub.math_reward import exact_number
from slime.rollout.rm_hub.settings import RewardArgs

_TAIL_CHARS = 300
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_NO_ANSWER = "[INVALID]"
_UNITS = (
    "degrees?|cm|mm|km|centimeters?|meters?|miles?|inches|inch|feet|foot|units?|square|cubic|dollars?|"
    "cents?|points?|minutes?|hours?|days?|weeks?|months?|years?|seconds?|percent|edges|sq|mph|"
    "kmph|ft|m|s|h|p\\.m\\.|a\\.m\\."
)
_TRAILING_UNITS = re.compile(
    rf"(?<=[\d\s}}$])\s*(?:{_UNITS})(?:\s+(?:{_UNITS}))*\s*$", re.IGNORECASE
)


async def reward(args: RewardArgs, sample: Sample) -> dict[str, Any]:
    return grade(sample.response, sample.label)


def grade(response: str, label: object) -> dict[str, Any]:
    found = _ANSWER.findall(response[-_TAIL_CHARS:])
    pred = normalize(found[-1]) if found else _NO_ANSWER
    expected = "" if label is None else str(label)
    correct = (
        bool(found) and len(expected) <= _TAIL_CHARS and _same_integer(pred, normalize(expected))
    )
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def normalize(text: str) -> str:
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


def _same_integer(pred: str, label: str) -> bool:
    found, expected = exact_number(pred), exact_number(label)
    if found is None or expected is None:
        return bool(label) and pred == label
    return found == expected == expected.to_integral_value()
