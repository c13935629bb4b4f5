"""The tables of other packages' flags, kept as JSON so that parsing needs none of the packages.

`tools/read_flag_tables.py` writes them; each says which versions it was read from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from slime.config.flags.spec import Flag

_TUPLES = ("options", "off_options", "choices", "versions", "sets")
_SECRET = re.compile(
    r"(api_keys?|admin_api_key|password|secret|watermark_key\w*|db_url|redis_url)$"
)


def read_table(name: Literal["megatron", "sglang", "router"]) -> dict[str, Any]:
    """{"package": ..., "versions": [...], "flags": [row, ...]}"""
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())


def table_flags(name: Literal["megatron", "sglang", "router"], title: str) -> list[Flag]:
    table = read_table(name)
    group = f"{title} {', '.join(table['versions'])}"
    return [_flag(row, family=name, group=group) for row in table["flags"]]


def sglang_flags() -> list[Flag]:
    """Every option of an SGLang server, with the prefix --sglang-."""
    return table_flags("sglang", "SGLang")


def router_flags() -> list[Flag]:
    """Every option of SGLang's router, with the prefix --router-."""
    return table_flags("router", "sglang-router")


def _flag(row: dict[str, Any], **common: Any) -> Flag:
    values = {key: tuple(value) if key in _TUPLES else value for key, value in row.items()}
    return Flag(**values, **common, secret=bool(_SECRET.search(row["name"])))
