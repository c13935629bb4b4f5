"""All flags by name and by option, each table read once and only when it is needed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from slime.utils.flags import rollout, run, train
from slime.utils.flags.spec import Flag, flags_of

GROUPS: tuple[type[Any], ...] = (
    run.Mode,
    run.Cluster,
    train.Model,
    rollout.Rollout,
    rollout.Data,
    rollout.Reward,
    rollout.Eval,
    train.Algorithm,
    train.Optimizer,
    train.Checkpoint,
    run.Weights,
    run.FaultTolerance,
    run.Tracking,
    train.Sft,
)


@cache
def own_flags() -> dict[str, Flag]:
    return {flag.name: flag for group in GROUPS for flag in flags_of(group)}


@cache
def table_flags() -> dict[str, Flag]:
    """The flags of Megatron, SGLang and its router that are not slime's own."""
    tables = [read_table(name) for name in ("megatron", "sglang", "router")]
    return {f.name: f for table in tables for f in table if f.name not in own_flags()}


@cache
def all_flags() -> dict[str, Flag]:
    return {**own_flags(), **table_flags()}


@cache
def options() -> dict[str, Flag]:
    """Every option string with its flag."""
    return {o: f for f in all_flags().values() for o in (*f.options, *f.off_options)}


def read_table(name: str) -> list[Flag]:
    path = Path(__file__).parent / f"{name}.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["flags"]
    tuples = ("options", "off_options", "choices", "versions")
    return [Flag(**{k: tuple(v) if k in tuples else v for k, v in row.items()}) for row in rows]
