"""`--rm-type gpqa`: multiple choice; 1 if the choice that the response names as its answer is correct.

`--rm-grading strict` finds only a letter right after "answer is", a choice by its text, and otherwise the
last character that is the letter of a choice: "no idea" counts as A.
"""

from __future__ import annotations

import re
import string
from functools import partial
from typing import Any

from slime.core.types import Sample
from slime.rollout.base_types import RewardArgs
from slime.rollout.hook_calls import in_thread
from slime.rollout.rm_hub.math_reward import last_boxed

_TAIL_CHARS = 5000  # end of a response that is searched
_DEFAULT = "ABCDEFGHIJ"  # letters of rows that list none
_GAP = r"[\s:=*_`\"'({\[\\$]{0,12}"
_BEFORE = (
    rf"{_GAP}(?:(?:is|are|would be|must be|text|boxed|mathbf|option|choice|answer){_GAP}){{0,4}}"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s{0,8}\{|[${}*]")


async def reward(args: RewardArgs, sample: Sample) -> float:
    return await in_thread(grade, sample.response, sample.label, sample.metadata)


async def strict_reward(args: RewardArgs, sample: Sample) -> float:
    grade_strictly = partial(grade, strict=True)
    return await in_thread(grade_strictly, sample.response, sample.label, sample.metadata)


def grade(response: str, label: object, metadata: dict[str, Any], *, strict: bool = False) -> float:
    valid = _valid_letters(metadata)
    if not valid:
        raise ValueError(
            "--rm-type gpqa: a row's choices are named by something else than letters: give `choices` as a "
            "list of texts or a dictionary with keys A, B, ..."
        )
    choices = _choices(metadata, valid)
    right = _right_letter(label, metadata, valid, choices)
    find = find_letter_strictly if strict else find_letter
    return float(right is not None and find(response, valid, choices) == right)


def find_letter(response: str, valid: str, choices: dict[str, str] | None = None) -> str | None:
    """Return the letter of the choice that the response names.

    In this order: named as the answer or boxed, by letter or by text; called correct; named as option or
    choice; the last letter that stands alone; the only choice whose text occurs.
    """
    text = response.rsplit("</think>", 1)[-1][-_TAIL_CHARS:]
    patterns = _patterns(valid)
    return (
        _last(patterns["answer"], text)
        or _boxed_choice(text, valid, choices or {})
        or _last(patterns["correct"], text)
        or _last(patterns["option"], text)
        or _only_choice(_after_answer(text), choices or {})
        or _last(patterns["alone"], text)
        or _only_choice(text, choices or {})
    )


def find_letter_strictly(
    response: str, valid: str, choices: dict[str, str] | None = None
) -> str | None:
    """Return the letter right after a phrase such as "answer is", of the only choice that occurs, or the last one."""
    text = response.rsplit("</think>", 1)[-1][-_TAIL_CHARS:]
    letter = rf"([{valid}])\b"
    named = rf"(?i)\b(?:answer|option|choice)(?: {{0,4}}(?:is|:)){{0,2}} {{0,4}}{letter}"
    called = rf"(?i)\b{letter} {{0,4}}is {{0,4}}(?:the {{0,4}})?correct"
    return (
        _last(re.compile(named), text)
        or _last(re.compile(called), text)
        or _only_choice(text, choices or {})
        or next((one for one in reversed(text.upper()) if one in valid), None)
    )


def _patterns(valid: str) -> dict[str, re.Pattern[str]]:
    letters = f"[{valid}]"
    # A small letter is also a word ("the answer is a matter of ..."): it must end the phrase.
    small = f"[{valid.lower()}](?=\\s*(?:[.)\\]}},;:*]|$))"
    letter = f"({letters}|{small})(?![\\w'])"
    # A and I are words too: alone they count unless a sentence continues after them.
    words = "".join(sorted(set(valid) & set("AI")))
    plain = "".join(sorted(set(valid) - set("AI")))
    alone = "|".join(
        part
        for part in (f"[{plain}]" if plain else "", f"[{words}](?!\\s+[a-z])" if words else "")
        if part
    )
    return {
        "answer": re.compile(rf"(?<![A-Za-z])(?i:answer)(?i:{_BEFORE})(?<![A-Za-z]){letter}"),
        "correct": re.compile(
            rf"(?<![\w']){letter}[\s)\]}}*.:]{{0,4}}(?i:is (?:the )?(?:correct|right))\b"
        ),
        "option": re.compile(
            rf"(?<![A-Za-z])(?i:option|choice)(?i:{_BEFORE})(?<![A-Za-z]){letter}"
            r"(?![\s)\]}*.:]{0,4}(?i:is (?:not|wrong|incorrect|false)))"
        ),
        "alone": re.compile(rf"(?<![\w'])({alone})(?![\w'])"),
    }


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1].upper() if found else None


def _boxed_choice(text: str, valid: str, choices: dict[str, str]) -> str | None:
    boxed = _plain(last_boxed(text) or "")
    bare = boxed.strip("() ").upper()
    if len(bare) == 1 and bare in valid:
        return bare
    return next((letter for letter, choice in choices.items() if boxed == _plain(choice)), None)


def _after_answer(text: str) -> str:
    """Return the rest of the line after the last "answer"."""
    lower = text.lower()
    start = lower.rfind("answer") if len(lower) == len(text) else -1
    return text[start:].split("\n", 1)[0] if start >= 0 else ""


def _only_choice(text: str, choices: dict[str, str]) -> str | None:
    """Return the only choice whose text occurs as whole words; a longer match hides those inside it."""
    words = f" {_words(text)} "
    found = {
        letter: phrase
        for letter, choice in choices.items()
        if (phrase := _words(choice)) and f" {phrase} " in words
    }
    longest = [
        letter
        for letter, phrase in found.items()
        if not any(phrase != other and f" {phrase} " in f" {other} " for other in found.values())
    ]
    return longest[0] if len(longest) == 1 else None


def _words(text: str) -> str:
    plain = _plain(text)
    return " ".join(plain.translate(_TO_SPACES).split())


_TO_SPACES = str.maketrans(dict.fromkeys(",;:!?\"'()[]`", " ") | {".": None})


def _valid_letters(metadata: dict[str, Any]) -> str:
    given = metadata.get("valid_letters")
    if given:
        letters = [str(letter).strip().upper()[:1] for letter in given]
        return "".join(letter for letter in letters if letter in string.ascii_uppercase and letter)
    choices = metadata.get("choices")
    if choices and isinstance(choices, dict):
        return "".join(_choices(metadata, ""))
    return string.ascii_uppercase[: len(choices)] if choices else _DEFAULT


def _right_letter(
    label: object, metadata: dict[str, Any], valid: str, choices: dict[str, str]
) -> str | None:
    """Return the letter that the label means: a letter, the index of a choice (from 0), or its text."""
    given = metadata.get("correct_letter")
    if given:
        return str(given).strip().upper()[:1]
    text = "" if label is None else str(label).strip()
    for letter, choice in choices.items():
        if _plain(choice) == _plain(text):
            return letter
    bare = text.strip("().[] ").upper()
    if len(bare) == 1 and bare in valid:
        return bare
    if text.isdecimal() and int(text[:9]) < len(valid):
        return valid[int(text)]
    return None


def _choices(metadata: dict[str, Any], valid: str) -> dict[str, str]:
    choices = metadata.get("choices") or []
    if isinstance(choices, dict):
        named = {str(letter).strip().upper()[:1]: str(text) for letter, text in choices.items()}
        return {letter: text for letter, text in named.items() if letter in string.ascii_uppercase}
    return dict(zip(valid, map(str, choices), strict=False))


def _plain(text: str) -> str:
    return " ".join(_WRAPPED.sub("", text).lower().split()).rstrip(".")
