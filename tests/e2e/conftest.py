from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.parallel import made_once
from tests.tiny import make_tiny_checkpoint


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """Of one rank and one engine, apart; nobody may change what it left."""

    flags: dict[str, object]  # those that decide what is learned
    run_dir: Path
    checkpoints: Path
    rollouts: str  # pattern of the recorded ones


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", weight_scale=2.0)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def plain_run(tiny_model, tiny_data, tmp_path_factory) -> PlainRun:
    """A whole run of three rollouts, made once for all tests that compare another one with it."""

    def describe(folder: Path) -> PlainRun:
        return PlainRun(
            flags={"sglang_enable_deterministic_inference": True, "num_rollout": 3},
            run_dir=folder / "run",
            checkpoints=folder / "checkpoints",
            rollouts=str(folder / "rollouts" / "{rollout_id}.pt"),
        )

    def make(folder: Path) -> None:
        plain = describe(folder)
        written = {"save": plain.checkpoints, "save_debug_rollout_data": plain.rollouts}
        words = runs.command(tiny_model, tiny_data, plain.run_dir, **plain.flags, **written)
        status, output = runs.run(words)
        assert status == 0, output

    return describe(made_once(tmp_path_factory, "plain", make))
