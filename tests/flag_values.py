"""A value for any flag that asks for something else than leaving the flag out."""

from __future__ import annotations

from typing import Any

from slime.config.flags.spec import Flag

_SPECIAL: dict[str, Any] = {
    "pipeline_model_parallel_layout": ["Et|tL"],
    "moe_layer_freq": "[0]*1+[1]*1",
    "attention_dropout": 0.1,
    "transformer_impl": "transformer_engine",
}


def other_value(flag: Flag) -> Any:
    if flag.name in _SPECIAL:
        return _SPECIAL[flag.name]
    value = _one(flag)
    return [value] if flag.many else value


def _one(flag: Flag) -> Any:
    if flag.kind == "bool":
        return not flag.default
    if flag.choices:
        return next((c for c in flag.choices if c != flag.default), flag.default)
    if flag.kind in ("int", "size"):
        return 2 if flag.default in (None, []) else int(flag.default) + 2
    if flag.kind == "float":
        return 0.25 if flag.default != 0.25 else 0.5
    return {"a": 1} if flag.kind == "json" else "something"


def words(flag: Flag, value: Any) -> list[str]:
    """The command line that gives `flag` this value."""
    if flag.kind == "bool":
        return [flag.option if value else flag.off_options[0]]
    if flag.kind == "json":
        import json

        return [flag.option, json.dumps(value)]
    return [flag.option, *map(str, value if flag.many else [value])]
