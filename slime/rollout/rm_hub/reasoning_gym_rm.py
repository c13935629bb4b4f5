"""`--rm-type reasoning_gym`: the task of the row scores the content of `<answer>`, of a box, or the whole text."""

from __future__ import annotations

from typing import Any

from slime.core.errors import UserError
from slime.core.types import Sample
from slime.rollout.rm_hub.math_reward import last_boxed
from slime.rollout.rm_hub.settings import RewardArgs, isolated
from slime.rollout.rm_hub.workers import workers
from slime.utils.reasoning_tasks import METADATA_KEY, MOST_ROWS, SEED, check_task

TIME_LIMIT_S = 10.0
_MAX_ANSWER_CHARS = 10_000


async def reward(args: RewardArgs, sample: Sample) -> float:
    task, row = _task_and_row(sample)
    answer = find_answer(sample.response)
    if not answer:
        return 0.0
    pool = workers("reasoning_gym_answers", time_limit_s=TIME_LIMIT_S, isolate=isolated(args))
    score = await pool.ask([task, SEED, MOST_ROWS, row, answer])
    return float(score) if isinstance(score, (int, float)) else 0.0


def find_answer(response: str) -> str:
    text = response.rsplit("</think>", 1)[-1][-_MAX_ANSWER_CHARS:]
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    if start >= 0:
        return text[start + len("<answer>") : text.find("</answer>", start)].strip()
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip()


def _task_and_row(sample: Sample) -> tuple[str, int]:
    place: Any = sample.metadata.get(METADATA_KEY)
    if not isinstance(place, dict) or not isinstance(place.get("row"), int):
        raise UserError(
            "the reward reasoning_gym is for rows of --prompt-data reasoning-gym:<task>; sample "
            f"{sample.index} is not one"
        )
    task = str(place.get("task"))
    check_task(task, f"sample {sample.index}")
    return task, place["row"]
