r"""`--rm-type math`: the last \boxed{} of the response against the label, 1 or 0."""

from __future__ import annotations

from slime.rollout.rm_hub.boxed import last_boxed
from slime.rollout.rm_hub.math_equal import math_equal


async def grade(response: str, label: object) -> float:
    answer, expected = last_boxed(response), label_text(label)
    if not answer or not expected:
        return 0.0
    return float(await math_equal(answer, expected))


def label_text(label: object) -> str:
    """The label as text; one that itself holds a box means what is in it."""
    text = "" if label is None else str(label).strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed
