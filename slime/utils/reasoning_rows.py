"""Rows of a reasoning-gym task: `python reasoning_rows.py TASK SEED SIZE START STOP` prints JSON lines.

Some tasks iterate over sets, so their rows depend on the hash seed of the process. This one is started with
a fixed seed, as are the workers that grade, so that a row is always the same.
"""

import sys

del sys.path[0]  # this folder; its modules are not top-level ones

import json  # noqa: E402


def main() -> None:
    import reasoning_gym

    task, *numbers = sys.argv[1:]
    seed, size, start, stop = map(int, numbers)
    rows = reasoning_gym.create_dataset(task, seed=seed, size=size)
    for number in range(start, stop):
        entry = rows[number]
        print(json.dumps([entry["question"], str(entry["answer"])]))


if __name__ == "__main__":
    main()
