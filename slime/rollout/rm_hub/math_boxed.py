r"""`--rm-type math`: the last \boxed{} of the response against the label, 1 or 0."""

from __future__ import annotations

from slime.core.types import Sample
from slime.rollout.rm_hub.boxed import last_boxed
from slime.rollout.rm_hub.math_equal import math_equal
from slime.rollout.rm_hub.settings import RewardArgs, isolated


async def reward(args: RewardArgs, sample: Sample) -> float:
    return await grade(sample.response, sample.label, isolate=isolated(args))


async def grade(response: str, label: object, *, isolate: bool = True) -> float:
    answer, expected = last_boxed(response), label_text(label)
    if not answer or not expected:
        return 0.0
    return float(await math_equal(answer, expected, isolate=isolate))


def label_text(label: object) -> str:
    """Return the label as text; one that itself holds a box means what is in it."""
    text = "" if label is None else str(label).strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed
