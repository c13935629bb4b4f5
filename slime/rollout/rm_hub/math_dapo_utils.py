"""Public import path of `slime.compat.math_grading.compute_score`."""

from slime.compat.math_grading import compute_score

__all__ = ["compute_score"]
