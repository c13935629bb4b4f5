"""Configurations that cannot work, each with the nearest one that does; the rows are in tests/refusals/.

`python -m tests.wrong_configurations` regenerates docs/refusals.md from the messages of slime.
"""

from __future__ import annotations

import json
import shlex
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from slime.config.arguments import Args, resolve
from slime.config.flags.draft import Draft
from slime.config.flags.parser import read_command_line
from slime.core.errors import ConfigError
from tests.refusals.parallel_layout import PARALLEL
from tests.refusals.placement import ENGINES, GPUS
from tests.refusals.row import MODELS, Wrong
from tests.refusals.training import BATCHES, NOT_HONOURED

DOCUMENT = Path(__file__).parent.parent / "docs" / "refusals.md"

TABLES = {
    "Nodes and GPUs": GPUS,
    "Engines": ENGINES,
    "Parallel layout": PARALLEL,
    "Batches, lengths, files": BATCHES,
    "Flags that would not be honoured": NOT_HONOURED,
}


def configure(flags: str, wrong: Wrong, *, offline: bool = False) -> Args:
    """A small valid run with these flags on top, as the row's machine resolves it.

    With `offline`, packages missing on the machine of the test do not matter.
    """
    given = read_command_line([*_valid(wrong.model), *shlex.split(flags)])
    origins = dict.fromkeys(given, "command line")
    gpus, cluster = wrong.machine.gpus, wrong.machine.cluster
    return resolve(Draft(given, origins, gpus=gpus, cluster=cluster, offline=offline))


def refusal(wrong: Wrong) -> str:
    try:
        configure(wrong.flags, wrong)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{wrong.flags} was accepted")


def document() -> str:
    """docs/refusals.md"""
    parts = [_HEAD]
    for title, rows in TABLES.items():
        parts.append(f"\n## {title}\n\n| what | typed | where | slime says |\n|---|---|---|---|\n")
        for row in rows:
            cells = (row.what, f"`{row.flags}`", row.machine.words, refusal(row))
            parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


_HEAD = """# What slime refuses, and what it says

Every row was typed on top of a valid run (GRPO on Qwen3-4B or GLM-4.5, 32 prompts x 8 samples) and is
refused with exit status 2 before a process, Ray or a model is started; `slime: ` stands in front of the
sentence. `tests/unit/test_wrong_configurations.py` types all of them, and beside each one its nearest
configuration that works. This page is written by `python -m tests.wrong_configurations`.
"""


def _valid(model: str) -> list[str]:
    folder = _folder()
    flags = f"--hf-checkpoint {folder / model} --prompt-data {folder / 'prompts.jsonl'} --bf16"
    flags += f" --run-dir {folder / 'run'} --num-rollout 3 --rollout-batch-size 32"
    flags += " --n-samples-per-prompt 8 --rollout-max-response-len 1024 --rm-type math"
    return flags.split()


@cache
def _folder() -> Path:
    folder = Path(mkdtemp(prefix="slime-wrong-"))
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return folder


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(DOCUMENT, file=sys.stderr)
