"""The options of SGLang's router, with the prefix router-."""

from __future__ import annotations

import ast
from typing import Any

from flag_tables.sglang import added_arguments, off_options
from flag_tables.source import Source, Unknown, evaluate, find_class, find_function, keywords

ROUTER_ARGS = "sglang_router/router_args.py"


def read_router(source: Source) -> list[dict[str, Any]]:
    owner = find_class(source.module(ROUTER_ARGS), "RouterArgs")
    defaults = _defaults(owner)
    calls = added_arguments(find_function(owner, "add_cli_args"))
    return [_row(call, defaults) for call in calls]


def _row(call: ast.Call, defaults: dict[str, Any]) -> dict[str, Any]:
    given = keywords(call)
    options = [_spelling(arg) for arg in call.args]
    kind = ast.unparse(given["type"]) if "type" in given else "str"
    action = ast.unparse(given["action"]).strip("'\"") if "action" in given else ""
    kind = "bool" if action == "store_true" else kind
    return {
        "name": options[0].removeprefix("--").replace("-", "_"),
        "kind": kind,
        "default": _value(given.get("default"), defaults),
        "help": " ".join(str(_value(given.get("help"), defaults) or "").split()),
        "choices": _value(given.get("choices"), defaults) or [],
        "many": "nargs" in given,
        "options": options,
        "off_options": off_options("router-", options[0][len("--router-") :])
        if kind == "bool"
        else [],
    }


def _spelling(node: ast.expr) -> str:
    """Return an option with the prefix, which f"--{prefix}policy" has and "--host" gets."""
    option = str(evaluate(node, {"prefix": ""})).removeprefix("--")
    return f"--router-{option}"


def _value(node: ast.expr | None, names: dict[str, Any]) -> Any:
    if node is None:
        return None
    try:
        return evaluate(node, names)
    except Unknown:
        return None


def _defaults(owner: ast.ClassDef) -> dict[str, Any]:
    fields = [
        n for n in owner.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    return {f"RouterArgs.{ast.unparse(n.target)}": _value(n.value, {}) for n in fields}
