"""The short reward types: random, remote_rm, f1, ifbench and reasoning_gym."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from slime.core.errors import ConfigError, UserError
from slime.core.types import Sample
from slime.rollout.base_types import Reward, RewardArgs
from slime.rollout.hook_calls import call_slots, in_thread
from slime.rollout.rm_hub.math_reward import last_boxed
from slime.rollout.rm_hub.workers import isolated, workers
from slime.rollout.sampling import hash32
from slime.utils.http import post
from slime.utils.reasoning_tasks import METADATA_KEY, MOST_ROWS, SEED, check_task

REMOTE_TIMEOUT_S = 300.0
REMOTE_CALLS = 256  # that run concurrently
WORKER_LIMIT_S = 10.0  # per answer
_MAX_IFBENCH_CHARS = 200_000
_MAX_ANSWER_CHARS = 10_000
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_EXACT = ("yes", "no", "noanswer")


async def random(args: RewardArgs, sample: Sample) -> float:
    """Return 0 or 1 by the sample's index (or its texts), the same in every run."""
    identity = (sample.index,) if sample.index is not None else (sample.prompt, sample.response)
    return float(hash32("random_rm", *identity) & 1)


async def remote_rm(args: RewardArgs, sample: Sample) -> Reward:
    """POST {prompt, response, label} to `--rm-url`."""
    return await ask_service(sample, args.rm_url)


async def ask_service(
    sample: Sample, url: str | None, deadline_s: float = REMOTE_TIMEOUT_S
) -> Reward:
    """Return the JSON reply of the service: a number, or an object for `--reward-key`.

    At most REMOTE_CALLS requests run concurrently; waiting for a slot is not part of the deadline.
    """
    if not url:
        raise ConfigError("--rm-type remote_rm needs the address of the service: --rm-url")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    slots = call_slots(REMOTE_CALLS, "remote_rm")
    return await post(url, payload, deadline_s=deadline_s, slots=slots)


async def f1(args: RewardArgs, sample: Sample) -> float:
    """Return F1 of the words of response and label."""
    return await in_thread(grade_f1, sample.response, sample.label)


def grade_f1(response: str, label: object) -> float:
    """Return the best F1 over the labels if the label is a list."""
    labels = label if isinstance(label, (list, tuple)) else [label]
    found = normalize(response)
    return max(
        (_f1(found, normalize("" if one is None else str(one))) for one in labels), default=0.0
    )


def normalize(text: str) -> str:
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _f1(found: str, expected: str) -> float:
    if (found in _EXACT or expected in _EXACT) and found != expected:
        return 0.0
    found_words, expected_words = found.split(), expected.split()
    shared = sum((Counter(found_words) & Counter(expected_words)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(found_words), shared / len(expected_words)
    return 2 * precision * recall / (precision + recall)


async def ifbench(args: RewardArgs, sample: Sample) -> float:
    """Return 1 if the response follows every instruction of its prompt, else 0; a worker checks it.

    `metadata["instruction_id_list"]` names the instructions and `metadata["kwargs"]` holds the arguments
    of each, as the files of IFEval (Zhou et al. 2023, arXiv:2311.07911) have them.
    """
    ids = sample.metadata.get("instruction_id_list")
    if not isinstance(ids, list) or not ids:
        raise UserError(
            f'sample {sample.index}: the ifbench reward needs metadata["instruction_id_list"], a list '
            'of instruction ids, and metadata["kwargs"], a list of their arguments'
        )
    given = sample.metadata.get("kwargs") or [{}] * len(ids)
    if len(given) != len(ids):
        raise UserError(f"sample {sample.index}: {len(ids)} instruction ids, {len(given)} kwargs")
    response = sample.response.rsplit("</think>", 1)[-1][:_MAX_IFBENCH_CHARS]
    pool = workers("instructions", time_limit_s=WORKER_LIMIT_S, isolate=isolated(args))
    return float(bool(await pool.ask([response, ids, given])))


async def reasoning_gym(args: RewardArgs, sample: Sample) -> float:
    """Return the score of the response's answer by the task of the row."""
    task, row = _task_and_row(sample)
    answer = find_answer(sample.response)
    if not answer:
        return 0.0
    pool = workers("reasoning_gym_answers", time_limit_s=WORKER_LIMIT_S, isolate=isolated(args))
    score = await pool.ask([task, SEED, MOST_ROWS, row, answer])
    return float(score) if isinstance(score, (int, float)) else 0.0


def find_answer(response: str) -> str:
    """Return the content of `<answer>`, of a box, or the whole text."""
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
