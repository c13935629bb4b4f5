"""All flags by name and by option: slime's own, and tables of Megatron's, SGLang's and the router's.

The tables are JSON files, so that parsing needs none of these packages. `tools/read_flag_tables.py`
writes them; each names the versions it was read from.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slime.config.env import looks_secret
from slime.config.flags import algorithm, rollout, run, train
from slime.config.flags.megatron import megatron_flags
from slime.config.flags.spec import Flag, flags_of
from slime.utils.printable import HIDDEN, hide_in_address, hide_secrets

Table = Literal["megatron", "sglang", "router"]
_TUPLES = ("options", "off_options", "choices", "versions", "sets")
_SECRET = re.compile(
    r"(api_keys?|admin_api_key|password|secret|watermark_key\w*|db_url|redis_url)$"
)
_ADDRESS_FLAG = re.compile(r"(url|host|addr|endpoint)s?$")


class OwnFlags(
    run.Mode,
    run.Cluster,
    train.Model,
    rollout.Rollout,
    rollout.Data,
    rollout.Reward,
    rollout.Eval,
    algorithm.Algorithm,
    train.Optimizer,
    train.Checkpoint,
    run.Weights,
    run.FaultTolerance,
    run.Tracking,
    algorithm.Sft,
):
    """Every group of flags that slime declares itself, in the order of the documentation."""


@cache
def own_flags() -> dict[str, Flag]:
    return {flag.name: flag for group in OwnFlags.__bases__ for flag in flags_of(group)}


@cache
def foreign_flags() -> dict[str, Flag]:
    """Return the flags of Megatron, SGLang and its router that slime does not declare itself."""
    flags = [
        *megatron_flags(table_flags("megatron", "Megatron-core")),
        *table_flags("sglang", "SGLang"),  # every option of a server, with the prefix --sglang-
        *table_flags("router", "sglang-router"),  # the router's, with the prefix --router-
    ]
    return {flag.name: flag for flag in flags if flag.name not in own_flags()}


@cache
def all_flags() -> dict[str, Flag]:
    return {**own_flags(), **foreign_flags()}


@cache
def options() -> dict[str, Flag]:
    """Return every option string with its flag."""
    return {o: f for f in all_flags().values() for o in (*f.options, *f.off_options)}


def read_table(name: Table) -> dict[str, Any]:
    """Return {"package": ..., "versions": [...], "flags": [row, ...]}."""
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())


def table_flags(name: Table, title: str) -> list[Flag]:
    table = read_table(name)
    group = f"{title} {', '.join(table['versions'])}"
    return [_flag(row, family=name, group=group) for row in table["flags"]]


def redact(name: str, value: Any) -> Any:
    """Return the value without secrets: of secret flags, in dictionaries and in addresses."""
    flag = own_flags().get(name) or all_flags().get(name)
    if flag is not None and flag.secret and value is not None:
        return HIDDEN
    if _ADDRESS_FLAG.search(name) and isinstance(value, str) and "://" not in value:
        return hide_in_address(value)
    return _redact_inside(value)


def _flag(row: dict[str, Any], **common: Any) -> Flag:
    values = {key: tuple(value) if key in _TUPLES else value for key, value in row.items()}
    return Flag(**values, **common, secret=bool(_SECRET.search(row["name"])))


def _redact_inside(value: Any) -> Any:
    if isinstance(value, str):
        return hide_secrets(value)
    if isinstance(value, list):
        return [_redact_inside(item) for item in value]
    if isinstance(value, dict):
        return {
            key: HIDDEN if looks_secret(str(key)) else _redact_inside(item)
            for key, item in value.items()
        }
    return value
