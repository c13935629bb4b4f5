"""Multiple choice and verifiable instructions."""

from __future__ import annotations

import time

import pytest

from slime.core.errors import UserError
from slime.core.types import Sample
from slime.rollout.rm_hub import async_rm, gpqa
from slime.rollout.rm_hub.inside.instructions import INSTRUCTIONS, follows
from slime.utils.http import run
from tests.args import make_args
from tests.odd_texts import ODD


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is C.", "C"),
        ("the correct answer is (b)", "B"),
        ("Answer: **D**", "D"),
        ("Final answer: \\boxed{A}", "A"),
        ("I choose option C because B is wrong", "C"),
        ("My choice: D", "D"),
        ("so B is correct, unlike C", "B"),
        ("(C) is the correct one", "C"),
        ("maybe A ... no. C", "C"),
        ("\\boxed{\\text{B}}", "B"),
        ("<think>the answer is A</think> The answer is B", "B"),
        ("answer is A. Wait, the answer is D", "D"),
        ("the answer is a matter of taste: B", "B"),
        ("no letters here", None),
        ("ABCD", None),
        ("", None),
    ],
)
def test_the_letter_a_response_settles_on(response, letter):
    assert gpqa.find_letter(response, "ABCD") == letter


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("C", {}),
        ("(c)", {}),
        (2, {}),
        ("2", {"choices": ["red", "green", "blue", "grey"]}),
        ("Blue.", {"choices": ["red", "green", "blue", "grey"]}),
        ("blue", {"choices": {"A": "red", "B": "green", "C": "blue"}}),
        (None, {"correct_letter": "c"}),
        ("7", {"choices": ["5", "6", "7", "0"]}),  # the text of a choice before its index
    ],
)
def test_labels_by_letter_index_and_text(label, metadata):
    assert gpqa.grade("The answer is C", label, metadata) == 1.0
    assert gpqa.grade("The answer is B", label, metadata) == 0.0


def test_only_valid_letters_count():
    assert gpqa.grade("the answer is E", "E", {"choices": list("wxyz")}) == 0.0
    assert gpqa.grade("the answer is E", "E", {"valid_letters": ["A", "E"]}) == 1.0
    assert gpqa.grade("the answer is A", None, {}) == 0.0


# instruction, arguments, a response that follows it, one that does not
CASES = [
    ("keywords:existence", {"keywords": ["fox", "dog"]}, "Dog and FOX", "fox only"),
    ("keywords:frequency", {"keyword": "la", "frequency": 3}, "la la la", "la la"),
    ("keywords:frequency", {"keyword": "la", "frequency": 3, "relation": "less than"}, "la", "lalala"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a Cat."),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 2}, "Zz", "z"),
    ("language:response_language", {"language": "de"},
     "Das ist ein langer deutscher Satz über das Wetter in Hamburg.",
     "This is a long English sentence about the weather."),
    ("length_constraints:number_sentences", {"num_sentences": 2},
     "Dr. Who pays 3.50 here. Yes!", "Dr. Who pays 3.50 here."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"},
     "One only.", "One. Two."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3}, "one two three", "one two"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Hence"},
     "So.\n\nHence, it is.", "Hence.\n\nSo."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi\nP.S. bye", "Hi"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Hi\nP.P.S bye", "P.S. x"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Perhaps."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a* **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2},
     "Part 1 x Part 2 y", "Part 1 x"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Of mice>>\ntext", "<< >>"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say hi. Hi!", "Hi!"),
    ("startend:end_checker", {"end_phrase": "That is all."}, "x. That is all.", "That is all. x"),
    ("startend:quotation", {}, '"so"', 'so"'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2}, "AB CD e", "AB c"),
    ("change_case:english_capital", {}, "THIS IS AN ENGLISH SENTENCE ABOUT THE SEA", "This one"),
    ("change_case:english_lowercase", {}, "this is an english sentence about the sea", "This one"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_instructions(name, arguments, good, bad):
    assert follows(good, name, arguments)
    assert not follows(bad, name, arguments)
    assert not follows("", name, arguments)


def test_every_instruction_is_tested_and_there_are_as_many_as_ifeval_has():
    assert {case[0] for case in CASES} == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25


def test_all_must_hold_and_mistakes_in_the_data_are_errors():
    args = make_args(rm_type="ifbench")

    def grade(ids, kwargs):
        metadata = {"instruction_id_list": ids, "kwargs": kwargs}
        return run(async_rm(args, Sample(response="<think>,</think>a b", metadata=metadata)))

    two = ["punctuation:no_comma", "length_constraints:number_words"]
    unused = {"num_words": 2, "relation": "at least", "keyword": None}
    assert grade(two, [{}, unused]) == 1.0
    assert grade(two, [{}, {**unused, "num_words": 3}]) == 0.0
    with pytest.raises(UserError, match=r"unknown instruction id 'no:such'"):
        grade(["no:such"], [{}])
    with pytest.raises(UserError, match="2 instruction ids, 1 kwargs"):
        grade(two, [{}])
    with pytest.raises(UserError, match="arguments of keywords:existence"):
        grade(["keywords:existence"], [{}])
    with pytest.raises(UserError, match="instruction_id_list"):
        run(async_rm(args, Sample(response="x")))


@pytest.mark.parametrize("response", ODD, ids=range(len(ODD)))
def test_odd_text_never_raises_and_takes_no_time(response):
    start = time.thread_time()  # a machine that stalls does not count
    assert gpqa.grade(response, "Q", {}) == 0.0
    for name, arguments, *_ in CASES:
        follows(response[:20_000], name, arguments)
    assert time.thread_time() - start < 10.0


def test_choices_without_letters_are_refused():
    metadata = {"choices": {"1": "red", "2": "blue"}}
    with pytest.raises(ValueError, match="choices are named by something else than letters"):
        gpqa.grade("The answer is 2.", "2", metadata)


@pytest.mark.parametrize("choices", [[], {}, None])
def test_without_choices_the_letters_are_those_of_the_default(choices):
    assert gpqa.grade("The answer is B.", "B", {"choices": choices}) == 1.0
