"""Responses no grader should fall over: unbalanced, deep, long, binary, or endless to compute."""

from __future__ import annotations

import os

ODD = [
    "",
    "\\boxed{}",
    "\\boxed{" * 5000,
    "\\boxed{" + "{" * 400 + "1" + "}" * 400 + "}",
    "\\boxed{" + "(" * 300 + "1" + ")" * 300 + "}",
    "}" * 1000 + "\\boxed{1",
    "\x00\ud800\\boxed{\x00}",
    "\\boxed{\\frac{1}{0}}",
    "\\boxed{9^{9^{9^{9}}}}",
    "\\boxed{\\int_0^1 \\sum_{n=1}^{\\infty} \\frac{x^n}{n!} dx}",
    "\\boxed{" + "x+" * 400 + "}",
    "\\boxed{\\left\\right\\frac\\sqrt}",
    "</think>" * 3000 + "\\boxed{2}",
    "Answer: " * 12000,
    os.urandom(100_000).decode("latin-1"),
]
