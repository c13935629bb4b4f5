"""Tasks of the package reasoning-gym by name: `--prompt-data reasoning-gym:leg_counting@[0:500]`.

A row depends on the task and its index alone, so a sample carries only these two. Answers are scored in
the sandbox (rollout/rm_hub/simple_rewards.py), where the row is generated again.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from slime.core.errors import ConfigError

DEFAULT_ROWS = 1000
METADATA_KEY = "reasoning_gym"  # in a sample's metadata: {"task": name, "row": index}
SEED = 42
MOST_ROWS = 1 << 30
HASH_SEED = {"PYTHONHASHSEED": "0"}
# Prints rows as JSON lines; its arguments are TASK SEED SIZE START STOP.
_MAKER = """
import sys
del sys.path[0]  # the working directory
import json
import reasoning_gym
task, *numbers = sys.argv[1:]
seed, size, start, stop = map(int, numbers)
rows = reasoning_gym.create_dataset(task, seed=seed, size=size)
for number in range(start, stop):
    entry = rows[number]
    print(json.dumps([entry["question"], str(entry["answer"])]))
"""


def task_rows(task: str, rows: range, flag: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield question, answer and metadata of each row."""
    check_task(task, flag)
    for row, (question, answer) in zip(rows, _make_rows(task, rows, flag), strict=True):
        metadata = {"rm_type": "reasoning_gym", METADATA_KEY: {"task": task, "row": row}}
        yield question, answer, metadata


def chosen_rows(part: slice) -> range:
    """Return the rows of a slice of an infinite task: the first thousand without a stop."""
    stop = DEFAULT_ROWS if part.stop is None else part.stop
    if (part.start or 0) < 0 or stop < 0:
        raise ConfigError("rows of a reasoning-gym task count from 0: write @[0:500]")
    return range(part.start or 0, stop)


@cache
def _make_rows(task: str, rows: range, flag: str) -> list[tuple[str, str]]:
    """Generate the rows in a process with the hash seed of the graders.

    Some tasks iterate over sets, so their rows depend on it.
    """
    numbers = [SEED, MOST_ROWS, rows.start, rows.stop]
    done = subprocess.run(
        [sys.executable, "-s", "-c", _MAKER, task, *map(str, numbers)],
        capture_output=True, text=True, env=HASH_SEED, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{flag} reasoning-gym:{task}: its rows cannot be generated: {reason}")
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


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
