r"""`slime.rollout.rm_hub.math_dapo_utils` and `math_utils`: the graders of `--rm-grading strict`, as functions.

They may be called from any thread and event loop. Those that need sympy use a worker process in the sandbox.
"""

from __future__ import annotations

import asyncio
from typing import Any

from slime.rollout.rm_hub import strict_math
from slime.utils.http import background_loop

_LOOP = "slime-graders"  # a separate loop, because a hook blocks its own loop while it waits


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False
) -> dict[str, Any]:
    r"""Grade the last "Answer:" line, or with `strict_box_verify` the last \boxed{}.

    Returns {"score": 1.0 or -1.0, "acc": whether it is right, "pred": the answer}.
    """
    return strict_math.grade_dapo(solution_str, ground_truth, strict_box_verify=strict_box_verify)


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last \boxed{}, None without one."""
    return strict_math.boxed(passage)


def grade_answer_mathd(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal after the string normalization of the MATH dataset."""
    return strict_math.math_form(given_answer) == strict_math.math_form(ground_truth)


def grade_answer_sympy(given_answer: str, ground_truth: str) -> bool:
    """Return whether two answers are equal by PRM800K's rules, with sympy."""
    return _wait(strict_math.math_equal(given_answer, ground_truth))


def grade_answer_verl(solution_str: str, ground_truth: str) -> bool:
    r"""Return whether the last \boxed{} of a response is right."""
    return bool(_wait(strict_math.grade_math(solution_str, ground_truth)))


def _wait(coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop(_LOOP)).result()
