"""No function that reads a model's text takes more than linear time, whatever the text.

Eight times the text may take eight times as long, times a generous factor; quadratic code takes 64 times.
Degenerate policies repeat one token up to the length limit, so nobody has to attack for this to happen.
"""

from __future__ import annotations

import inspect
import itertools
import time
from functools import partial

import pytest

from examples.search_agent import search_agent
from examples.tool_agent import tool_agent
from slime.data.openai_replies import parse_tool_calls
from slime.rollout.rm_hub import code, gpqa, math_reward, strict_math
from slime.rollout.rm_hub.inside.instructions import INSTRUCTIONS
from slime.rollout.rm_hub.math_reward import exact_number, grade_dapo, last_boxed
from slime.rollout.rm_hub.simple_rewards import find_answer, grade_f1

SIZES = (500, 4_000, 32_000)  # characters
FACTOR = 4.0  # on top of linear growth
NOTICED_S = 0.02  # shorter measurements say nothing

UNITS = [
    "\n", " ", "\t", "\n ", " \n", "x ", "x\n", "`", "```", "```\n", "``` ", "```py\n", "```python\n\n",
    "<tool_call>", "<tool_call>\n", "</tool_call>", "<tool_call>{}", "<<", ">>", "<<a", "<< >>", "<",
    "\\boxed{", "\\boxed ", "\\boxed", "\\fbox{", "{", "}", "{}", "{,}", "<think>", "</think>", "\\",
    "1", "1,", ",", "1,000", ".", "1.", ". ", "a.", "A. ", "A.A", "?", "!\"", "-", "- ", "* ", "*", "**",
    "*a", "***", "$", "%", "=", "|", "<|", "|>", "answer", "answer:", "Answer: ", "answer is ", "option (",
    "A) ", "a", "A", "is correct ", "<answer>", "<answer>x", "</answer>", "\\text{", "\\text{}", "\\frac",
    "^{\\circ}", "^", "\\left", "[", "]", "[]", "(", ")", "'", '"', "P.S", "p. s", "P.S.\n", "the ", "an ",
    "Part 1 ", "Part", "1e", "e", "\\times10^", "\\times", "E+", "json", '{"a":', "[[", "cm ", "m ", "é",
    "<search>", "</search>", "</search> ", "<calc>", "</calc> ",
]  # fmt: skip
OPENINGS = [("\\boxed{1", ""), ("<tool_call>", "x"), ("answer: 1", " x"), ("```", ""), ("P.S", "x")]
TEXTS = [
    *(("", unit, "") for unit in UNITS),
    *(("x", unit, "x") for unit in UNITS),
    *(
        (before, unit, after)
        for before, after in OPENINGS
        for unit in ("\n", " ", "1", "x ", ",", "{")
    ),
]

ARGUMENTS = {
    "keywords:existence": {"keywords": ["fox"]},
    "keywords:frequency": {"keyword": "aa", "frequency": 3},
    "keywords:forbidden_words": {"forbidden_words": ["cat"]},
    "keywords:letter_frequency": {"letter": "z", "let_frequency": 2},
    "change_case:capital_word_frequency": {"capital_frequency": 2},
    "length_constraints:number_sentences": {"num_sentences": 2},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_words": {"num_words": 3},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": 1, "nth_paragraph": 1, "first_word": "Hence",
    },
    "detectable_content:number_placeholders": {"num_placeholders": 2},
    "detectable_content:postscript": {"postscript_marker": "P.P.S"},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:number_highlighted_sections": {"num_highlights": 2},
    "detectable_format:multiple_sections": {"section_spliter": "Part", "num_sections": 2},
    "combination:repeat_prompt": {"prompt_to_repeat": "Say hi"},
    "startend:end_checker": {"end_phrase": "That is all."},
}  # fmt: skip
_LANGUAGE = ("language:", "change_case:english")  # langdetect, of which 10,000 characters see

FUNCTIONS = {
    "last_boxed": last_boxed,
    "label_text": math_reward.label_text,
    "normal_form": math_reward.normal_form,
    "number": exact_number,
    "mixed_numbers": math_reward.mixed_numbers,
    "strict boxed": strict_math.boxed,
    "strict math_form": strict_math.math_form,
    "strict sympy_form": strict_math.sympy_form,
    "strict grade_dapo": lambda text: strict_math.grade_dapo(text, "17"),
    "strict dapo label": lambda text: strict_math.grade_dapo("Answer: 17", text),
    "strict gpqa": lambda text: gpqa.find_letter_strictly(text, "ABCD", {"A": "x", "B": "y"}),
    "find_program": code.find_program,
    "find_answer": find_answer,
    "grade_dapo": lambda text: grade_dapo(text, "17"),
    "dapo label": lambda text: grade_dapo("Answer: 17", text),
    "f1": lambda text: grade_f1(text, "the 17"),
    "gpqa": lambda text: gpqa.grade(text, "C", {}),
    "gpqa with choices": lambda text: gpqa.grade(
        text, "B", {"choices": ["red fox", "a", "1", "x"]}
    ),
    "parse_tool_calls": lambda text: parse_tool_calls(text, "id"),
    "search_agent": search_agent.find_answer,
    "tool_agent": lambda text: tool_agent._CALL.search(text),
    "search_agent search": lambda text: search_agent._SEARCH.search(text),
    **{
        name: partial(check, **ARGUMENTS.get(name, {}))
        for name, check in INSTRUCTIONS.items()
        if not name.startswith(_LANGUAGE)
    },
}


def test_every_instruction_is_measured():
    for name, check in INSTRUCTIONS.items():
        if not name.startswith(_LANGUAGE):
            inspect.signature(check).bind("text", **ARGUMENTS.get(name, {}))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_time_grows_with_the_text_and_no_faster(function):
    slow = [
        (before, unit, after)
        for before, unit, after in TEXTS
        if not _is_linear(lambda n, b=before, u=unit, a=after: b + u * (n // len(u)) + a, function)
    ]
    assert slow == []


def test_the_measurement_finds_quadratic_and_cubic_patterns():
    """The expressions of an earlier version, and one text each that they are slow on."""
    import re

    fence = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL)
    call = re.compile(r"\n?<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
    title = re.compile(r"<<[^\n]+?>>")
    assert not _is_linear(lambda n: "```" + " " * n, fence.findall)
    assert not _is_linear(lambda n: "<tool_call>" + "\n" * (n // 10), call.findall)
    assert not _is_linear(lambda n: "<<" * (n // 2), title.findall)


def _is_linear(text_of, function) -> bool:
    """Compare the times of two sizes each; a measurement on a busy machine gets three tries."""
    for smaller, larger in itertools.pairwise(SIZES):
        for _ in range(3):
            long_s = _seconds(function, text_of(larger))
            if long_s < NOTICED_S:
                break
            short_s = min(_seconds(function, text_of(smaller)) for _ in range(5))
            if long_s <= FACTOR * larger / smaller * max(short_s, 1e-4):
                break
        else:
            return False
    return True


def _seconds(function, text: str) -> float:
    start = time.thread_time()  # what other processes take does not count
    function(text)
    return time.thread_time() - start
