"""Sums of two numbers from 1 to 20, which a small instruct model talks about more often than it gives them.

    python examples/addition/addition.py FOLDER      writes train.jsonl and heldout.jsonl

There are 400 pairs; `heldout` has 100 of them and `train` the others.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

from slime.utils.types import Sample

LARGEST, NUM_HELDOUT, SEED = 20, 100, 0
_NUMBER = re.compile(r"\d+")


async def reward(args: object, sample: Sample) -> float:
    """1 if the last number of the response is the sum, else 0."""
    numbers = _NUMBER.findall(sample.response)
    return float(numbers[-1:] == [sample.label])


def make_row(a: int, b: int) -> dict[str, object]:
    messages = [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": f"What is {a} + {b}?"},
    ]
    return {"prompt": messages, "label": str(a + b)}


def write_data(folder: Path) -> None:
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    random.Random(SEED).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"heldout": pairs[:NUM_HELDOUT], "train": pairs[NUM_HELDOUT:]}
    for name, part in parts.items():
        lines = "".join(json.dumps(make_row(a, b)) + "\n" for a, b in part)
        (folder / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    write_data(Path(sys.argv[1]))
