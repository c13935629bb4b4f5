"""Rewards for whole runs, loaded by import path as a user's would be."""

import json
from pathlib import Path

from slime.config.arguments import Args
from slime.config.env import read_env
from slime.core.types import Sample
from slime.utils.sync_http import get_json


async def dense(args: object, sample: Sample) -> float:
    """The share of even tokens: every random model has some, so that groups differ from the start."""
    response = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in response) / len(response)


async def broken(args: object, sample: Sample) -> float:
    raise RuntimeError("no reward today")


async def flaky(args: object, sample: Sample) -> float:
    """Fails for every fourth sample: one of each group of four."""
    assert sample.index is not None
    if sample.index % 4 == 0:
        raise RuntimeError("no reward today")
    return await dense(args, sample)


def note_released_memory(args: Args) -> None:
    """Write what engine 0 has released; trainers call this hook when they have a model."""
    port = json.loads((Path(args.run_dir) / "logs" / "engine_0.port").read_text())["port"]
    token = read_env().engine_token
    info = get_json(f"http://127.0.0.1:{port}/server_info", token=token)
    (Path(args.run_dir) / "released.json").write_text(
        json.dumps(info["internal_states"][0]["released"])
    )


def evaluate(args: object, rollout_id: int, data_source: object, evaluation: bool) -> dict:
    """An evaluation that needs no dataset of slime's."""
    assert evaluation
    return {"mine": {"rewards": [1.0, 0.0], "truncated": [False, True]}}


def parts(args: object, sample: Sample) -> dict[str, float | str]:
    """A dictionary: the share of even tokens, and whether the response is long."""
    response = sample.tokens[-sample.response_length :]
    even = sum(token % 2 == 0 for token in response) / len(response)
    return {"even": even, "long": float(len(response) >= 8), "why": "text"}


def constant(args: object, sample: Sample) -> float:
    return 0.5
