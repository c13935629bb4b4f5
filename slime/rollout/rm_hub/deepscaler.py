r"""`--rm-type deepscaler`: like math, but only behind the thinking part, without which it is 0."""

from __future__ import annotations

from slime.rollout.rm_hub import math_boxed


async def grade(response: str, label: object) -> float:
    for marker in ("</think>", "###Response"):
        if marker in response:
            return await math_boxed.grade(response.rsplit(marker, 1)[1], label)
    return 0.0
