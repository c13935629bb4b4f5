r"""Answers written in odd ways, against truth derived by hand or math-verify's own grade."""

from __future__ import annotations

import pytest

from slime.core.types import Sample
from slime.rollout.rm_hub import batched_async_rm, gpqa
from slime.rollout.rm_hub.math_reward import exact_number, grade_dapo
from slime.utils.http import run
from tests.args import make_args

EQUAL = [
    ("1e3", "1000"), ("1E3", "1000"), ("1.5e-3", "0.0015"), ("2.5e3", r"\frac{5000}{2}"),
    (r"\frac{5000}{2}", "2.5e3"), (r"1.5\times10^3", "1500"), (r"1.5 \times 10^{3}", "1500"),
    (r"1.5 \cdot 10^{3}", "1500"), ("1.5x10^3", "1500"), (r"6.02\times 10^{23}", "6.02e23"),
    (r"1 \times 10^3", "10^3"), ("1.23e2", "123"), ("1,000", "1000"), ("1{,}000", "1000"),
    (r"1\,000", "1000"), ("1 000", "1000"), ("10{,}000", "10,000"), ("1,000,000.50", "1000000.5"),
    ("+5", "5"), ("\u22125", "-5"), ("- 5", "-5"), (".5", "0.5"), ("0.50", "1/2"), ("007", "7"), ("5.", "5"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"\frac12", "0.5"), (r"\tfrac{3}{4}", "0.75"),
    (r"3\frac{1}{2}", "3.5"), ("0.1+0.2", "0.3"), (r"50\%", "50"), (r"50\%", "0.5"), ("0.5", r"50\%"),
    (r"99.9\%", "99.9"), (r"\$5.00", "5"), (r"5 \text{ cm}", "5"), (r"5\text{ cm}^2", "5"), ("5 cm", "5"),
    (r"90^\circ", "90"), ("90\u00b0", "90"), ("90 degrees", "90"), (r"\sqrt 2", r"\sqrt{2}"),
    (r"\sqrt{12}", r"2\sqrt{3}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), ("2^{10}", "1024"),
    ("10^{-2}", "0.01"), ("5!", "120"), (r"\binom{5}{2}", "10"), ("x=5", "5"), ("5", "x=5"),
    ("y = 2x + 1", "y=1+2x"), ("(1,2)", "(1, 2)"), ("[1,2)", "[1, 2)"), (r"(-\infty, 3)", r"(-\infty,3)"),
    (r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)"), (r"\{1,2,3\}", r"\{3,2,1\}"), ("1,2,3", "3,2,1"),
    (r"x=1 \text{ or } x=2", "1,2"), (r"\pm 2", "2,-2"), (r"\text{(A)}", "A"), ("(A)", "A"),
    (r"\textbf{(C)}", "C"), (r"\text{Yes}", "yes"), ("3:4", "3:4"), ("(x+1)(x-1)", "x^2-1"),
    ("3+4i", "4i+3"), (r"\emptyset", r"\varnothing"), (r"\sqrt[3]{8}", "2"), (r"x \le 5", r"x\leq 5"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
]  # fmt: skip
UNEQUAL = [
    ("1e3", "1e4"), ("1e400", "1e401"), ("1e3", "100"), (r"1.5\times10^3", "150"), ("1 2", "12"),
    ("10000000000000001", "10000000000000000"), ("9007199254740993", "9007199254740992"),
    (r"\frac{1}{3}", "0.333"), (r"\pi", "3.14159"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("2", r"\pm 2"),
    ("A", "B"), (r"\text{no}", "yes"), (r"\text{east}", "west"), (r"\infty", r"-\infty"), ("2023", "2024"),
    (r"\frac{22}{7}", r"\pi"), (r"50\%", "5"), ("1,00", "100"), ("1.000", "1000"),
]  # fmt: skip


def test_mathematics():
    pairs = [*((pair, 1.0) for pair in EQUAL), *((pair, 0.0) for pair in UNEQUAL)]
    samples = [Sample(response=rf"\boxed{{{answer}}}", label=label) for (answer, label), _ in pairs]
    rewards = run(batched_async_rm(make_args(rm_type="math"), samples))
    wrong = [pair for (pair, truth), got in zip(pairs, rewards, strict=True) if got != truth]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000), ("-1.5E+2", -150), (r"2\times10^{-1}", "0.2"), (r"2\cdot10^2", 200), ("3*10**2", 300),
        ("1,234,567.5", "1234567.5"), ("1 234", 1234), ("12,34", None), ("1e", None), ("e3", None), ("", None),
        ("1e99999", None), ("nan", None), ("1_000", None), ("1/2", None), (r"2\times11^2", None),
    ],
)  # fmt: skip
def test_exact_numbers(text, value):
    found = exact_number(text)
    assert found is None if value is None else found == type(found)(str(value))


@pytest.mark.parametrize(
    ("answer", "label", "correct"),
    [
        ("1e3", "1000", True), ("1,000", 1000, True), (r"\boxed{1{,}024}", "1024", True), ("042", "42", True),
        ("42.0", "42", True), ("42.5", "42", False), ("9007199254740993", "9007199254740992", False),
        ("nan", "nan", True), ("inf", "1", False), ("1_0", "10", False), ("x = 7", "7", True), ("", "", False),
    ],
)  # fmt: skip
def test_dapo_numbers(answer, label, correct):
    assert grade_dapo(f"so\nAnswer: {answer}", label)["acc"] is correct


ELEMENTS = {"choices": ["nitrogen", "oxygen", "carbon dioxide", "carbon"]}
TEN = {"choices": [f"choice {n}" for n in range(10)]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        # letters beyond D, where the row has so many choices
        *((f"The answer is {letter}.", letter, TEN, 1.0) for letter in "EFGHIJ"),
        ("The answer is (J)", "9", TEN, 1.0),
        ("The answer is K", "K", {"choices": [f"c{n}" for n in range(12)]}, 1.0),
        ("Answer: F", "F", {"choices": {"A": "x", "F": "y"}}, 1.0),
        ("Answer: E", "E", {"choices": list("wxyz")}, 0.0),
        ("I am sure it is H", "H", TEN, 1.0),
        ("H. I am sure", "H", TEN, 1.0),  # a pronoun is no choice
        ("B is my pick. A good exercise!", "B", {}, 1.0),  # nor is an article
        # answers given as text
        ("It is oxygen", "B", ELEMENTS, 1.0),
        ("It is oxygen.", "oxygen", ELEMENTS, 1.0),
        ("I think it is Oxygen!", "B", ELEMENTS, 1.0),
        ("The answer is carbon dioxide.", "C", ELEMENTS, 1.0),  # not carbon
        ("The answer is carbon.", "C", ELEMENTS, 0.0),
        ("It is not nitrogen. The answer is oxygen", "B", ELEMENTS, 1.0),
        (r"\boxed{\text{oxygen}}", "B", ELEMENTS, 1.0),
        (r"nitrogen or oxygen? \boxed{nitrogen}", "A", ELEMENTS, 1.0),
        ("nitrogen or oxygen", "B", ELEMENTS, 0.0),  # settles on none
        ("It is oxygenated water", "B", ELEMENTS, 0.0),
        # letters against letters
        (r"The answer is B. \boxed{B}", "B", {}, 1.0),
        (r"A or B ... \boxed{(C)}", "C", {}, 1.0),
        ("Option A is wrong, so B is correct. Option D is wrong.", "B", {}, 1.0),
        ("Option A is not right. I take option C", "C", {}, 1.0),
        ("The answer is not A but B", "B", {}, 1.0),
        ("C is the right answer", "C", {}, 1.0),
        ("**Answer: $\\mathbf{D}$**", "D", {}, 1.0),
        ("Answer: B) because A and C fail", "B", {}, 1.0),
    ],
)
def test_multiple_choice(response, label, metadata, reward):
    assert gpqa.grade(response, label, metadata) == reward
