"""Published command lines in whole runs at tiny size: generate, train, send the weights, twice.

CI starts one line of each family; `make test-published` (SLIME_TEST_PUBLISHED=1) starts all that resolve.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tests.compat.command_lines import LAUNCHERS, SCRIPTS, rows
from tests.compat.starts import NUM_ROLLOUT, start_of, tiny_model, write_files
from tests.e2e import runs
from tests.engines import TOKEN, engine_server

EVERY = [row for row in [*rows(SCRIPTS), *rows(LAUNCHERS)] if ":" not in row[1]]
OF_FAMILIES = (
    "run-glm4-9B",
    "run-mimo-7B-rl-eagle",
    "run-qwen3-235B-A22B-sft",
    "fully_async/run-qwen2.5-0.5B-fully_async",
)
# Lines that differ only in what is replaced here are one start, under the name of the first.
STARTS = {(row[1], *row[2], "async" in row[0], "#" in row[0]): row for row in reversed(EVERY)}
CHOSEN = [
    row
    for row in reversed(STARTS.values())
    if os.environ.get("SLIME_TEST_PUBLISHED") or row[0] in OF_FAMILIES
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("starts")
    write_files(base)
    return base


@pytest.fixture(autouse=True)
def model(folder, row) -> Path:
    path = folder / row[1]
    return path if path.exists() else tiny_model(path, row[1])


@pytest.fixture
def server(folder, row, model, monkeypatch):
    """The address of an engine for the lines that name one: a teacher, which differs, or external engines."""
    if "--rm-url" in row[2]:
        model = tiny_model(folder / f"{row[0].replace('/', ' ')} teacher", row[1], seed=1)
    elif "--rollout-external-engine-addrs" not in row[2]:
        yield ""
        return
    for variable in ("SLIME_RM_TOKEN", "SLIME_ENGINE_TOKEN"):
        monkeypatch.setenv(variable, TOKEN)
    with engine_server(model) as running:
        yield running.url


@pytest.mark.parametrize("row", CHOSEN, ids=[row[0] for row in CHOSEN])
def test_a_line_starts_and_trains(folder, row, server, tmp_path):
    before = row[0].removesuffix("#1")
    for name, model, words in [r for r in EVERY if r[0] in (before, row[0])]:
        run_dir = tmp_path / f"run {name == before}"
        script, argv = start_of(folder, run_dir, (name, model, words), server)
        status, output = runs.run(argv, script=script)
        (tmp_path / "output.txt").write_text(output)
        assert status == 0, output
        check_run(run_dir, words)


def check_run(run_dir: Path, words: list[str]) -> None:
    """Every rollout was generated and trained on, with gradients; at first perhaps the critic alone."""
    rollouts, trained = runs.metrics(run_dir, "rollout"), runs.metrics(run_dir, "train")
    assert len(rollouts) == NUM_ROLLOUT
    if "--debug-rollout-only" in words:
        assert not trained
        return
    assert [record["rollout_id"] for record in trained] == list(range(NUM_ROLLOUT))
    critic_only = "--num-critic-only-steps" in words
    for record in trained:
        who = "critic_" if critic_only and record["rollout_id"] == 0 else ""
        assert math.isfinite(record[f"train/{who}loss"]) and record[f"train/{who}grad_norm"] > 0
