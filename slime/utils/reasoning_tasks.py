"""Tasks of the package reasoning-gym by name: `--prompt-data reasoning-gym:leg_counting@[0:500]`.

A row is a function of the task and its number alone, so a sample carries only these two. Answers are
scored in the sandbox (rollout/rm_hub/reasoning_gym_rm.py), where the row is made again.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any

from slime.utils.errors import ConfigError

DEFAULT_ROWS = 1000
METADATA_KEY = "reasoning_gym"  # of a sample's metadata: {"task": name, "row": number}
SEED = 42
MOST_ROWS = 1 << 30


def task_rows(task: str, rows: range, flag: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Question, answer and metadata of each row."""
    dataset = _dataset(task, flag)
    for row in rows:
        entry = dataset[row]
        metadata = {"rm_type": "reasoning_gym", METADATA_KEY: {"task": task, "row": row}}
        yield entry["question"], str(entry["answer"]), metadata


def chosen_rows(part: slice) -> range:
    """Which rows a slice means, of tasks that never end: the first thousand without one."""
    stop = DEFAULT_ROWS if part.stop is None else part.stop
    if (part.start or 0) < 0 or stop < 0:
        raise ConfigError("rows of a reasoning-gym task count from 0: write @[0:500]")
    return range(part.start or 0, stop)


@cache
def _dataset(task: str, flag: str) -> Any:
    check_task(task, flag)
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=SEED, size=MOST_ROWS)


@cache
def check_task(task: str, flag: str) -> None:
    """Raise ConfigError if reasoning-gym is missing or has no such task."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            f"{flag} reasoning-gym:{task} needs the package: pip install 'slime[reasoning-gym]'"
        ) from None
    if task not in DATASETS or task == "composite":
        near = difflib.get_close_matches(task, DATASETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{flag}: reasoning-gym has no task {task!r}{hint}")
