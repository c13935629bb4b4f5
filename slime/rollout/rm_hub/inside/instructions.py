"""Inside the sandbox: the verifiable instructions of IFEval, one small function each.

Each takes time linear in the length of the response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

INSTRUCTIONS: dict[str, Callable[..., bool]] = {}
_MAX_DETECT_CHARS = 10_000  # langdetect reads no more


class UserMistake(Exception):
    """A mistake in the data, which the user must see."""


def load() -> Callable[[Any], bool]:
    """Return the function that answers [response, instruction ids, arguments of each]."""
    return lambda question: follows_all(*question)


def follows_all(response: str, ids: list[str], arguments: list[dict[str, Any] | None]) -> bool:
    pairs = zip(ids, arguments, strict=True)
    followed = [follows(response, name, given or {}) for name, given in pairs]
    return all(followed)


def follows(response: str, instruction_id: str, arguments: dict[str, Any]) -> bool:
    """Return whether the response follows one instruction; an empty response follows none."""
    check = INSTRUCTIONS.get(instruction_id)
    if check is None:
        raise UserMistake(
            f"unknown instruction id {instruction_id!r}: choose among {', '.join(INSTRUCTIONS)}"
        )
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(response.strip()) and check(response, **given)
    except TypeError as error:
        raise UserMistake(f"arguments of {instruction_id}: {error}") from None


def instruction(name: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    def register(check: Callable[..., bool]) -> Callable[..., bool]:
        INSTRUCTIONS[name] = check
        return check

    return register


# ---- words


@instruction("keywords:existence")
def has_keywords(text: str, keywords: list[str]) -> bool:
    return all(_count(word, text) for word in keywords)


@instruction("keywords:frequency")
def keyword_frequency(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compare(_count(keyword, text), frequency, relation)


@instruction("keywords:forbidden_words")
def no_forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(
        re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words
    )


@instruction("keywords:letter_frequency")
def letter_frequency(
    text: str, letter: str, let_frequency: int, let_relation: str = "at least"
) -> bool:
    return _compare(text.lower().count(letter.lower()), let_frequency, let_relation)


# ---- language and case


@instruction("language:response_language")
def response_language(text: str, language: str) -> bool:
    return _language(text) in (language, None)


@instruction("change_case:english_capital")
def english_capital(text: str) -> bool:
    return text.isupper() and _language(text) in ("en", None)


@instruction("change_case:english_lowercase")
def english_lowercase(text: str) -> bool:
    return text.islower() and _language(text) in ("en", None)


@instruction("change_case:capital_word_frequency")
def capital_word_frequency(
    text: str, capital_frequency: int, capital_relation: str = "at least"
) -> bool:
    words = [word for word in re.findall(r"[\w'-]+", text) if word.isupper()]
    return _compare(len(words), capital_frequency, capital_relation)


# ---- lengths


@instruction("length_constraints:number_sentences")
def number_sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    return _compare(len(sentences(text)), num_sentences, relation)


@instruction("length_constraints:number_words")
def number_words(text: str, num_words: int, relation: str = "at least") -> bool:
    return _compare(len(re.findall(r"\w+", text)), num_words, relation)


@instruction("length_constraints:number_paragraphs")
def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Count paragraphs separated by the markdown divider `***`."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1] if len(parts) > 1 else []
    return all(part.strip() for part in inner) and num_paragraphs == sum(
        bool(part.strip()) for part in parts
    )


@instruction("length_constraints:nth_paragraph_first_word")
def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Check the first word of a paragraph; paragraphs are separated by two line breaks and count from 1."""
    paragraphs = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    found = re.match(r"[\"'(*_]*([^\s.,?!'\")*_]+)", paragraphs[nth_paragraph - 1])
    return found is not None and found[1].lower() == first_word.lower()


# ---- content


@instruction("detectable_content:number_placeholders")
def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]*\]", text)) >= num_placeholders


@instruction("detectable_content:postscript")
def postscript(text: str, postscript_marker: str) -> bool:
    loose = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = loose.get(postscript_marker, re.escape(postscript_marker))
    starts = (line.lstrip() for line in text.split("\n"))
    return any(re.match(pattern, start, re.IGNORECASE) for start in starts)


# ---- format


@instruction("detectable_format:number_bullet_lists")
def number_bullet_lists(text: str, num_bullets: int) -> bool:
    starts = [line.lstrip()[:2] for line in text.split("\n")]
    return sum(s[:1] == "-" or (s[:1] == "*" != s[1:] != "") for s in starts) == num_bullets


@instruction("detectable_format:constrained_response")
def constrained_response(text: str) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


@instruction("detectable_format:number_highlighted_sections")
def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Count sections written as `*text*` or `**text**`."""
    double = re.findall(r"\*\*([^\n*]+)\*\*", text)
    single = re.findall(r"(?<!\*)\*([^\n*]+)\*(?!\*)", text)
    return sum(bool(part.strip()) for part in [*double, *single]) >= num_highlights


@instruction("detectable_format:multiple_sections")
def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    pattern = rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?"
    return len(re.split(pattern, text)) - 1 >= num_sections


@instruction("detectable_format:json_format")
def json_format(text: str) -> bool:
    bare = text.strip()
    if bare.startswith("```"):
        bare = bare[7:] if bare[3:7].lower() == "json" else bare[3:]
    try:
        json.loads(bare.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title")
def title(text: str) -> bool:
    """Find `<<title>>` on one line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and line[start + 2 : max(end, 0)].strip("<> \t\r"):
            return True
    return False


# ---- combinations


@instruction("combination:two_responses")
def two_responses(text: str) -> bool:
    """Check for two different responses separated by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    parts = [part for part in parts if part]
    return len(parts) == 2 and parts[0] != parts[1]


@instruction("combination:repeat_prompt")
def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


# ---- start, end, punctuation


@instruction("startend:end_checker")
def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' == text[-1]


@instruction("punctuation:no_comma")
def no_comma(text: str) -> bool:
    return "," not in text


# ---- parts

_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Co|vs|etc|e\.g|i\.e|No|Fig)\.|\b[A-Z]\.(?=\s?[A-Z])"
    r"|(?<=\d)\.(?=\d)|\.(?=\w+\b)"
)


def sentences(text: str) -> list[str]:
    """Split after `.`, `!`, `?` and their repetitions, except in abbreviations and numbers."""
    held = _ABBREVIATION.sub(lambda match: match[0].replace(".", "\u2024"), text)
    parts = re.split(r"(?<=[.!?])[\"')\]]*\s+|\n{2,}", held)
    return [part for part in parts if re.search(r"\w", part)]


def _count(word: str, text: str) -> int:
    return text.lower().count(word.lower())


def _compare(count: int, wanted: int, relation: str) -> bool:
    if relation == "at least":
        return count >= wanted
    if relation == "less than":
        return count < wanted
    raise UserMistake(f"relation {relation!r}: expected 'at least' or 'less than'")


def _language(text: str) -> str | None:
    """Return a code such as "en"; None if no language is detected, which matches any."""
    detect, failure = _detector()
    try:
        return detect(text[:_MAX_DETECT_CHARS])
    except failure:
        return None


@cache
def _detector() -> tuple[Callable[[str], str], Any]:
    try:
        import langdetect
    except ImportError:
        raise UserMistake(
            "instructions about the language need langdetect: pip install 'slime[ifbench]'"
        ) from None
    langdetect.DetectorFactory.seed = 0
    return langdetect.detect, langdetect.LangDetectException
