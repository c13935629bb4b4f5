"""All flags by name and by option, each table read once and only when it is needed."""

from __future__ import annotations

from functools import cache
from typing import Any

from slime.config.flags import rollout, run, train
from slime.config.flags.megatron import megatron_flags
from slime.config.flags.spec import Flag, flags_of
from slime.config.flags.tables import router_flags, sglang_flags

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
def foreign_flags() -> dict[str, Flag]:
    """The flags of Megatron, SGLang and its router that are not slime's own."""
    flags = [*megatron_flags(), *sglang_flags(), *router_flags()]
    return {flag.name: flag for flag in flags if flag.name not in own_flags()}


@cache
def all_flags() -> dict[str, Flag]:
    return {**own_flags(), **foreign_flags()}


@cache
def options() -> dict[str, Flag]:
    """Every option string with its flag."""
    return {o: f for f in all_flags().values() for o in (*f.options, *f.off_options)}
