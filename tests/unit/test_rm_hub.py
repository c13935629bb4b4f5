"""Reward types: what each promises, and that odd text neither raises nor takes long."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import pytest

from slime.config.reward_types import REWARD_TYPES, needs_label, reward_type
from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.rollout.base_types import RewardFunction
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.math_reward import grade_dapo, last_boxed, normal_form
from slime.rollout.rm_hub.simple_rewards import grade_f1
from slime.utils.http import run
from slime.utils.load_function import load_function
from tests.odd_texts import ODD


@dataclass
class Settings:
    """The least that scoring asks of its arguments."""

    rm_type: str | None = None
    custom_rm_path: str | None = None
    rm_url: str | None = None
    reward_key: str | None = None


def score(rm_type, response, label, **fields):
    return run(async_rm(Settings(rm_type), Sample(response=response, label=label, **fields)))


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b{c}}d} tail", "a{b{c}}d"),
        (r"\fbox{7}", "7"),
        (r"\boxed 9 apples", "9"),
        (r"\boxed{}", ""),
        (r"\boxed{open {", None),
        (r"\boxed", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


EQUAL = [
    ("42", "42"),
    ("42.0", "42"),
    ("1,024", "1024"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"(1, 2)", r"\left(1,2\right)"),
    (r"30^\circ", "30"),
    (r"5\text{ cm}", "5"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\$12", "12"),
    (r"x=3", "3"),
]
UNEQUAL = [
    ("42", "43"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    (r"(2, 1)", "(1,2)"),
    ("x+1", "x+2"),
    ("", "5"),
    ("Evelyn", "Carla"),
]


def test_math_grades_the_last_box_by_value():
    async def grade_all(pairs):
        samples = [Sample(response=rf"\boxed{{{a}}}", label=b) for a, b in pairs]
        return await batched_async_rm(Settings("math"), samples)

    graded = run(grade_all(EQUAL + UNEQUAL))
    wrong = [
        pair
        for pair, reward, expected in zip(
            EQUAL + UNEQUAL, graded, [1.0] * len(EQUAL) + [0.0] * len(UNEQUAL), strict=True
        )
        if reward != expected
    ]
    assert wrong == []


def test_math_takes_the_last_box_only_and_a_boxed_label():
    assert score("math", r"\boxed{1} or \boxed{2}", "2") == 1.0
    assert score("math", r"\boxed{2} or \boxed{1}", "2") == 0.0
    assert score("math", "the answer is 2", "2") == 0.0
    assert score("math", r"\boxed{2}", r"thus \boxed{2}") == 1.0
    assert score("math", r"\boxed{2}", 2) == 1.0
    assert score("math", r"\boxed{2}", "") == 0.0
    assert score("math", r"\boxed{2}", None) == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"<think>\boxed{1}</think> \boxed{2}", 1.0),
        (r"<think>\boxed{2}</think> \boxed{1}", 0.0),
        (r"<think>\boxed{2}</think> two", 0.0),
        (r"a</think>\boxed{3}</think>\boxed{2}", 1.0),
        (r"x ###Response \boxed{2}", 1.0),
        (r"</think>\boxed{1} ###Response \boxed{2}", 1.0),  # still behind the last </think>
        (r"\boxed{2}", 0.0),
    ],
)
def test_deepscaler_looks_behind_the_thinking(response, reward):
    assert score("deepscaler", response, "2") == reward


@pytest.mark.parametrize(
    ("response", "pred", "correct"),
    [
        ("work\nAnswer: 42", "42", True),
        ("Answer: 41\nanswer: 42", "42", True),
        ("ANSWER : $\\boxed{42}$.", "42", True),
        ("Answer: x = 42", "42", True),
        ("Answer: 42 cm", "42", True),
        ("Answer: $42^\\circ$", "42", True),
        ("Answer: \\text{42}", "42", True),
        ("Answer: **42**", "42", True),
        ("Answer: 42<|im_end|>", "42", True),
        ("Answer: 43", "43", False),
        ("Answer: 42\nAnswer: 7", "7", False),
        ("42", "[INVALID]", False),
        ("Answer: 42" + " " * 300, "[INVALID]", False),
    ],
)
def test_dapo(response, pred, correct):
    expected = {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
    assert score("dapo", response, "42") == expected


def test_dapo_thousands_and_labels():
    assert grade_dapo("Answer: 1,234,567", 1234567)["acc"]
    assert grade_dapo("Answer: 1{,}024", "1024")["acc"]
    assert grade_dapo("Answer: -3", "-3.0")["acc"]
    assert not grade_dapo("Answer: 5", None)["acc"]
    assert not grade_dapo("Answer: ", "5")["acc"]


def naive_f1(response, label):
    def words(text):
        kept = "".join(c for c in text.lower() if c.isalnum() or c.isspace())
        return [w for w in kept.split() if w not in ("a", "an", "the")]

    found, expected = words(response), words(label)
    shared = sum((Counter(found) & Counter(expected)).values())
    return 2 * shared / (len(found) + len(expected)) if shared else 0.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("a tower in Paris, France", "Paris"),
        ("x y z z", "z z z w"),
        ("", "Paris"),
        ("nothing shared", "Paris"),
    ],
)
def test_f1_against_a_direct_count(response, label):
    assert score("f1", response, label) == pytest.approx(naive_f1(response, label))


def test_f1_exact_words_and_several_labels():
    assert grade_f1("yes, it is", "yes") == 0.0
    assert grade_f1("yes", "yes it is") == 0.0
    assert grade_f1("Yes.", "yes") == 1.0
    assert grade_f1("Paris", ["London", "paris"]) == 1.0


def test_random_is_seeded_and_even():
    samples = [Sample(index=i) for i in range(400)]
    rewards = run(batched_async_rm(Settings("random"), samples))
    assert rewards == run(batched_async_rm(Settings("random"), samples))
    assert set(rewards) == {0.0, 1.0}
    assert 150 < sum(rewards) < 250  # 5 standard deviations


def test_boxed_prefix_applies_to_the_boxed_text_only():
    assert score("boxed_f1", r"long talk \boxed{Paris}", "Paris") == 1.0
    assert score("f1", r"long talk \boxed{Paris}", "Paris") < 1.0
    assert score("boxed_f1", "no box", "Paris") == 0.0
    assert score("boxed_dapo", r"Answer: 3 \boxed{Answer: 4}", "4")["acc"]


def test_type_names():
    for name, kind in REWARD_TYPES.items():
        assert reward_type(name) is kind
        load_function(kind.grader, flag=name, protocol=RewardFunction, must_be_async=True)
    assert len({kind.grader for kind in REWARD_TYPES.values()}) == len(REWARD_TYPES)
    assert reward_type("boxed_f1") is REWARD_TYPES["f1"]
    for wrong in ("maths", "boxed_maths", "boxed_math", "boxed_deepscaler"):
        with pytest.raises(ConfigError, match="--rm-type"):
            reward_type(wrong)
    assert needs_label("boxed_f1") and needs_label("math")
    assert not needs_label("random") and not needs_label(None)
    with pytest.raises(ConfigError, match="--rm-type or --custom-rm-path"):
        score(None, "x", "y")
    with pytest.raises(ConfigError, match="--rm-url"):
        score("remote_rm", "x", "y")


@pytest.mark.parametrize("rm_type", ["dapo", "f1", "boxed_f1"])
@pytest.mark.parametrize("response", ODD, ids=range(len(ODD)))
def test_odd_text_never_raises_and_takes_no_time(rm_type, response):
    start = time.process_time()  # of all threads; a machine that stalls does not count
    reward = score(rm_type, response, "17")
    assert time.process_time() - start < 5.0
    assert -1.0 <= (reward["score"] if isinstance(reward, dict) else reward) <= 1.0


def test_normal_form_examples():
    assert normal_form(r"\dfrac{1}{2}\text{ cm}") == normal_form(r"\frac{1}{2}")
    assert normal_form(r" \left( 1,\,024 \right) ") == normal_form("(1,024)")
    assert normal_form("{5}") == "5"
    assert normal_form("1,024,000.5") == normal_form(r"1{,}024{,}000.5") == "1024000.5"
    assert normal_form("(1,024)") != normal_form("(1024)")
    assert normal_form("1 2") != normal_form("12")
