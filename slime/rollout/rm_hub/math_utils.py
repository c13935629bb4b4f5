"""Public import path of the graders of mathematics of `slime.compat.math_grading`."""

from slime.compat.math_grading import (
    extract_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    grade_answer_verl,
)

__all__ = ["extract_answer", "grade_answer_mathd", "grade_answer_sympy", "grade_answer_verl"]
