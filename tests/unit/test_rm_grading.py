r"""`--rm-grading`: what the lenient and the strict graders give for each class of answers, side by side."""

from __future__ import annotations

import pytest

from slime.config.reward_types import REWARD_TYPES
from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.rollout.base_types import RewardFunction
from slime.rollout.evaluation import dataset_args
from slime.rollout.rm_hub import async_rm, batched_async_rm, gpqa, strict_math
from slime.utils.http import run
from slime.utils.load_function import load_function
from tests.args import make_args
from tests.odd_texts import ODD

# response, label, lenient, strict
MATH = [
    # Equal for both.
    (r"\boxed{42}", "42", 1, 1),
    (r"\boxed{42.0}", "42", 1, 1),
    (r"\boxed{1,024}", "1024", 1, 1),
    (r"\boxed{1e3}", "1000", 1, 1),
    (r"\boxed{1 1/2}", r"\frac{3}{2}", 1, 1),
    (r"\boxed{1\frac{1}{2}}", "1.5", 1, 1),
    (r"\boxed{\dfrac{1}{2}}", r"\frac12", 1, 1),
    (r"\boxed{1/2}", r"\frac{1}{2}", 1, 1),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1, 1),
    (r"\boxed{x=5}", "5", 1, 1),
    (r"\boxed{5\text{ cm}}", "5", 1, 1),
    (r"\boxed{30^\circ}", "30", 1, 1),
    (r"\boxed{50\%}", "50", 1, 1),
    (r"\boxed{\sqrt2}", r"\sqrt{2}", 1, 1),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1, 1),
    (r"\boxed{(x+1)(x-1)}", "x^2-1", 1, 1),
    (r"\boxed{(1, 2)}", r"\left(1,2\right)", 1, 1),
    (r"\boxed{(0, 2x]}", "(0,x+x]", 1, 1),
    (r"\boxed{2\pi}", r"\pi+\pi", 1, 1),
    (r"\boxed{\text{Evelyn}}", "Evelyn", 1, 1),
    (r"\boxed{7}", r"thus \boxed{7}", 1, 1),
    # The lenient grader finds more.
    (r"\boxed{2^{10}}", "1024", 1, 0),
    (r"\boxed{\frac24}", r"\frac{1}{2}", 1, 0),
    (r"\boxed{\{2,1\}}", r"\{1,2\}", 1, 0),
    (r"\boxed{3,2,1}", "1,2,3", 1, 0),
    (r"\boxed 5", "5", 1, 0),
    (r"\fbox{5}", "5", 1, 0),
    (r"\boxed{\frac{10}{2}}", "5", 1, 0),
    (r"\boxed{5!}", "120", 1, 0),
    (r"\boxed{a+b+c}", "c+b+a", 1, 0),
    (r"\boxed{(0, \sqrt{8}]}", r"(0,2\sqrt{2}]", 1, 0),  # brackets inside: not split
    # MATH's normal form drops all spaces.
    (r"\boxed{1 1/2}", "11/2", 0, 1),
    # Wrong for both.
    (r"\boxed{43}", "42", 0, 0),
    (r"\boxed{(2,1)}", "(1,2)", 0, 0),
    (r"\boxed{(1,2)}", "[1,2]", 0, 0),
    (r"\boxed{x+1}", "x+2", 0, 0),
    (r"42", "42", 0, 0),
    (r"\boxed{}", "42", 0, 0),
    (r"\boxed{42", "42", 0, 0),
]
DEEPSCALER = [
    (r"<think>x</think> \boxed{2}", "2", 1, 1),
    (r"###Response \boxed{2}", "2", 1, 1),
    (r"###Response \boxed{1} ###Response \boxed{2}", "2", 1, 0),  # the last, the first
    (r"###Response \boxed{2} ###Response \boxed{1}", "2", 0, 1),
    (r"</think>\boxed{1} ###Response \boxed{2}", "2", 1, 1),
    (r"\boxed{2}", "2", 0, 0),
]
# response, label, lenient, strict, strict_box
DAPO = [
    ("Answer: 42", "42", 1, 1, -1),
    ("Answer: 41\nanswer : 42", 42, 1, 1, -1),
    ("Answer: $42$", "42", 1, 1, -1),
    (r"Answer: \boxed{42}", "42.0", 1, 1, 1),
    (r"Answer: x = 42", "42", 1, 1, -1),
    (r"Answer: $\boxed{3 cm}$", "3 cm", 1, 1, 1),  # a box is compared with the label as it is
    (r"Answer: $\boxed{1,024}$", "1,024", 1, 1, 1),
    (r"Answer: 42 cm", "42", 1, 1, -1),
    (r"Answer: $42^\circ$", "42", 1, 1, -1),
    (r"Answer: \text{42}", "42", 1, 1, -1),
    ("Answer: 1,024", "1024", 1, 1, -1),
    ("Answer: -3", "-3", 1, 1, -1),
    (r"Answer: $\frac{1}{2}$", r"\frac{1}{2}", 1, 1, -1),
    ("Answer: 42.0", "42", 1, -1, -1),
    ("Answer: 42.", "42", 1, -1, -1),
    ("Answer: **42**", "42", 1, -1, -1),
    ("Answer: 42%", "42", 1, -1, -1),
    ("Answer: +42", "42", 1, -1, -1),
    ("Answer: 0042", "42", 1, -1, -1),
    ("Answer: a 42", "42", -1, 1, -1),  # articles
    ("Answer: 43", "42", -1, -1, -1),
    ("42", "42", -1, -1, -1),
    (r"so \boxed{42}", "42", -1, -1, 1),
    (r"\boxed{42} " + "." * 100, "42", -1, -1, -1),  # not in the last 100 characters
    ("Answer: 42" + " " * 300, "42", -1, -1, -1),
    ("Answer: ", "", -1, -1, -1),
]
GREEK = {"choices": ["alpha", "beta", "gamma", "delta"]}
# response, label, metadata, lenient, strict
GPQA = [
    ("The answer is C", "C", {}, 1, 1),
    ("Answer: C.", "C", {}, 1, 1),
    ("I take option C because B fails", "C", {}, 1, 1),
    ("C is the correct one", "C", {}, 1, 1),
    ("the answer is gamma", "C", GREEK, 1, 1),
    ("The answer is F", "F", {}, 1, 1),
    ("The answer is F", "F", {"choices": list("uvwxyz")}, 1, 1),
    ("The answer is C", "gamma", GREEK, 1, 1),
    ("<think>The answer is A</think> The answer is C", "C", {}, 1, 1),
    ("The answer is (C), as shown", "C", {}, 1, 0),
    ("The answer is\nC because of that", "C", {}, 1, 0),
    ("no idea", "A", {}, 0, 1),
    ("The answer is B", "C", {}, 0, 0),
    ("", "C", {}, 0, 0),
]


def rewards(rm_type, rows, **flags):
    args = make_args(rm_type=rm_type, reward_key="score" if rm_type == "dapo" else None, **flags)
    samples = [Sample(response=row[0], label=row[1]) for row in rows]
    scored = run(batched_async_rm(args, samples))
    return [one["score"] if isinstance(one, dict) else one for one in scored]


@pytest.mark.parametrize(
    ("rm_type", "rows", "grading", "column"),
    [
        ("math", MATH, "lenient", 2),
        ("math", MATH, "strict", 3),
        ("deepscaler", DEEPSCALER, "lenient", 2),
        ("deepscaler", DEEPSCALER, "strict", 3),
        ("dapo", DAPO, "lenient", 2),
        ("dapo", DAPO, "strict", 3),
        ("dapo", DAPO, "strict_box", 4),
    ],
)
def test_rewards_of_each_class_of_answers(rm_type, rows, grading, column):
    found = rewards(rm_type, rows, rm_grading=grading)
    wrong = [(row, got) for row, got in zip(rows, found, strict=True) if got != row[column]]
    assert wrong == []


@pytest.mark.parametrize(("response", "label", "metadata", "lenient", "strict"), GPQA)
def test_multiple_choice(response, label, metadata, lenient, strict):
    sample = Sample(response=response, label=label, metadata=metadata)
    assert run(async_rm(make_args(rm_type="gpqa"), sample)) == lenient
    assert run(async_rm(make_args(rm_type="gpqa", rm_grading="strict"), sample)) == strict


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"\frac{\sqrt{2}}{2}", "sqrt(2)/2"),
        (r"\sqrt[3]{8}", "sqrt(8)"),
        (r"x^{2}+\pi", "x^2+pi"),
        (r"\frac", r"\frac"),  # without arguments
        (r"\mathbb{R}", "R"),
        (r"\alpha", r"\alpha"),
        ("{" * 60 + r"\pi" + "}" * 60, "{" * 60 + r"\pi" + "}" * 60),  # too deep
    ],
)
def test_latex_as_plain_text(text, form):
    assert strict_math.latex_text(text).strip() == form


HOSTILE = [
    r"\boxed{9^9^9^9^9}",
    r"\boxed{9**9**9**9}",
    r"\boxed{x^(9^(9^(9)))}",
    r"\boxed{" + "(" * 450 + "x" + ")" * 450 + "}",
    r"\boxed{" + "sqrt(" * 150 + "x" + ")" * 150 + "}",
    r"\boxed{" + r"\sqrt{" * 140 + "x" + "}" * 140 + "}",
    r"\boxed{" + r"\frac" * 190 + "}",
    r"\boxed{" + "x^9" * 300 + "}",
    r"\boxed{" + "9" * 900 + "^9x}",
    r"\boxed{1e999999999}",
    r"\boxed{__import__('os').system('touch /tmp/x')}",
    r"\boxed{" + "1 " * 490 + "}",
    r"\boxed{" + "1," * 490 + "}",
    r"\boxed{x" + "-" * 900 + "1}",
    r"\boxed{" + r"\text{ " * 140 + "}",
]


def test_hostile_answers_are_wrong_within_the_limits():
    """Huge exponents, deep nesting, endless patterns and Python: each costs its time limit at most."""
    rows = [(text, "x^2+1") for text in [*HOSTILE, *ODD]]
    assert rewards("math", rows, rm_grading="strict") == [0.0] * len(rows)
    assert rewards("dapo", rows, rm_grading="strict") == [-1.0] * len(rows)
    for text, label in rows:
        assert gpqa.grade(text, label, {}, strict=True) == 0.0


def test_graders_of_every_type_load():
    for name, kind in REWARD_TYPES.items():
        for path in kind.strict.values():
            load_function(path, flag=name, protocol=RewardFunction, must_be_async=True)


def test_a_dataset_has_its_own_grading(tmp_path):
    data = tmp_path / "held.jsonl"
    data.write_text('{"input": "1+1=", "label": "2"}\n')
    config = tmp_path / "eval.yaml"
    config.write_text(f"datasets:\n  - {{name: held, path: {data}, rm_grading: strict}}\n")
    args = make_args(rm_type="math", eval_config=str(config), eval_interval=1)
    sample = Sample(response=r"\fbox{2}", label="2")
    assert run(async_rm(args, sample)) == 1.0
    assert run(async_rm(dataset_args(args, args.eval_datasets[0]), sample)) == 0.0


def test_a_grading_that_no_type_of_the_run_has_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--rm-grading strict is for the reward types math, deep"):
        make_args(rm_type="f1", rm_grading="strict")
    with pytest.raises(ConfigError, match="--rm-grading strict_box is for the reward types dapo,"):
        make_args(rm_type="math", rm_grading="strict_box")
    make_args(rm_type="f1", allow_row_rm_types=["gpqa"], rm_grading="strict")
    config = tmp_path / "eval.yaml"
    config.write_text("datasets:\n  - {name: held, path: x, rm_type: f1, rm_grading: strict}\n")
    with pytest.raises(ConfigError, match="rm_grading of held: strict is for"):
        make_args(rm_type="math", eval_config=str(config), eval_interval=1)
