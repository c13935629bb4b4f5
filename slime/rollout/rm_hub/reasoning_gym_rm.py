"""Rows of reasoning-gym tasks, scored by their task: what `<answer>` or a box holds, or the whole text."""

from __future__ import annotations

import re

from slime.rollout.rm_hub.boxed import last_boxed
from slime.utils.errors import UserError
from slime.utils.reasoning_tasks import METADATA_KEY, score_answer
from slime.utils.types import Sample

TIME_LIMIT_S = 10.0
_LONGEST_ANSWER = 10_000  # characters
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def grade(sample: Sample) -> float:
    place = sample.metadata.get(METADATA_KEY)
    if not isinstance(place, dict):
        raise UserError(
            "the reward reasoning_gym is for rows of --prompt-data reasoning-gym:<task>; sample "
            f"{sample.index} is none"
        )
    answer = find_answer(sample.response)
    if not answer:
        return 0.0
    try:
        return score_answer(place["task"], place["row"], answer)
    except Exception:  # each task parses the answer in its own way, and few expect odd text
        return 0.0


def find_answer(response: str) -> str:
    text = response.rsplit("</think>", 1)[-1][-_LONGEST_ANSWER:]
    tagged = _ANSWER.findall(text)
    if tagged:
        return tagged[-1].strip()
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip()
