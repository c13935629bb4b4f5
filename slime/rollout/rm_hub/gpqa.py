"""`--rm-type gpqa`: multiple choice; 1 if the letter the response settles on is the right one."""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.rm_hub.settings import RewardArgs
from slime.utils.types import Sample
from slime.utils.user_code import in_thread

_SEARCHED = 5000  # characters at the end in which the answer is looked for
_LETTERS = "ABCDEFGHIJ"
_BEFORE = r"[\s:=*_`\"'({\[\\$]{0,12}(?:(?:is|are|would be|must be|text|boxed|mathbf|option|choice|answer)[\s:*_`\"'({\[\\$]{0,12}){0,4}"


async def reward(args: RewardArgs, sample: Sample) -> float:
    return await in_thread(grade, sample.response, sample.label, sample.metadata)


def grade(response: str, label: object, metadata: dict[str, Any]) -> float:
    valid = _valid_letters(metadata)
    right = _right_letter(label, metadata, valid)
    found = find_letter(response, valid)
    return float(right is not None and found == right)


def find_letter(response: str, valid: str) -> str | None:
    """The letter named as the answer, else called correct, else the last one that stands alone."""
    text = response.rsplit("</think>", 1)[-1][-_SEARCHED:]
    letters = f"[{valid}]"
    # A small letter is also a word ("the answer is a matter of ..."): it must end the phrase.
    small = f"[{valid.lower()}](?=\\s*(?:[.)\\]}},;:*]|$))"
    letter = f"({letters}|{small})(?![\\w'])"
    named = re.compile(
        rf"(?<![A-Za-z])(?i:answer|option|choice)(?i:{_BEFORE})(?<![A-Za-z]){letter}"
    )
    correct = re.compile(rf"(?<![\w']){letter}[\s)\]}}*.:]{{0,4}}(?i:is (?:the )?correct)\b")
    alone = re.compile(rf"(?<![\w']){letters}(?![\w'])")
    for pattern in (named, correct, alone):
        found = pattern.findall(text)
        if found:
            return found[-1].upper()
    return None


def _valid_letters(metadata: dict[str, Any]) -> str:
    given = metadata.get("valid_letters")
    if given:
        return "".join(str(letter).strip().upper()[:1] for letter in given)
    choices = metadata.get("choices")
    return _LETTERS[: len(choices)] if choices else _LETTERS


def _right_letter(label: object, metadata: dict[str, Any], valid: str) -> str | None:
    """The label may be a letter, the index of a choice (from 0), or the text of one."""
    given = metadata.get("correct_letter")
    if given:
        return str(given).strip().upper()[:1]
    text = "" if label is None else str(label).strip()
    choices = _choices(metadata, valid)
    for letter, choice in choices.items():
        if _plain(choice) == _plain(text):
            return letter
    bare = text.strip("().[] ").upper()
    if len(bare) == 1 and bare in valid:
        return bare
    if text.isdecimal() and int(text) < len(valid):
        return valid[int(text)]
    return None


def _choices(metadata: dict[str, Any], valid: str) -> dict[str, str]:
    choices = metadata.get("choices") or []
    if isinstance(choices, dict):
        return {str(letter).strip().upper()[:1]: str(text) for letter, text in choices.items()}
    return dict(zip(valid, map(str, choices), strict=False))


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).rstrip(".")
