"""SGLang's ServerArgs and the options its parser adds by hand, as flags with the prefix sglang-."""

from __future__ import annotations

import ast
from typing import Any

from flag_tables.shape import Shape, shape_of
from flag_tables.source import (
    Source,
    Unknown,
    constants,
    evaluate,
    find_class,
    find_function,
    keywords,
)

SERVER_ARGS = "sglang/srt/server_args.py"
_PARSERS = {"loads": "json", "json_list_type": "json", "human_readable_int": "size"}
_FLAG_ACTIONS = ("DeprecatedStoreTrueAction", "DeprecatedStoreConstAction", "DeprecatedAction")
PREFIX = "sglang-"


def read_sglang(source: Source) -> list[dict[str, Any]]:
    """Return every option of `python -m sglang.launch_server`, in the order of the source."""
    module = source.module(SERVER_ARGS)
    groups = source.modules_under("sglang/srt/arg_groups/")
    names = {k: v for m in (module, *groups) for k, v in constants(m).items()}
    owner = find_class(module, "ServerArgs")
    owners = [owner, *(n for m in groups for n in m.body if _is_namespace(n))]
    rows: dict[str, dict[str, Any]] = {}
    for node in (n for o in owners for n in o.body if isinstance(n, ast.AnnAssign)):  # type: ignore
        row = _field(node, names)
        if row is not None:
            rows.setdefault(row["name"], row)
    for call in added_arguments(find_function(owner, "add_cli_args")):
        row = _added(call, names)
        if row is not None:
            rows.setdefault(row["name"], row)
    return [{**row, "versions": [source.version]} for row in rows.values()]


def merge_versions(
    older: list[dict[str, Any]], newer: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the options of both; where both have one, the newer describes it and both their choices count."""
    rows = {row["name"]: row for row in older}
    for row in newer:
        before = rows.get(row["name"])
        if before is not None:
            choices = list(dict.fromkeys([*before["choices"], *row["choices"]]))
            row = {**row, "versions": before["versions"] + row["versions"]}
            row["choices"] = choices if before["choices"] and row["choices"] else []
            row["options"] = list(dict.fromkeys([*row["options"], *before["options"]]))
        rows[row["name"]] = row
    return list(rows.values())


def added_arguments(function: ast.FunctionDef) -> list[ast.Call]:
    """Return the `parser.add_argument(...)` calls of a function."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "add_argument"]


def off_options(prefix: str, option: str) -> list[str]:
    """Return `--no-sglang-x`, and `--sglang-no-x` for what SGLang itself spells `--no-x`."""
    return [f"--no-{prefix}{option}", f"--{prefix}no-{option}"]


def _is_namespace(node: ast.stmt) -> bool:
    targets = [
        n.targets[0].id
        for n in getattr(node, "body", [])
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    ]
    return isinstance(node, ast.ClassDef) and "_NS_PATH" in targets


def _field(node: ast.AnnAssign, names: dict[str, Any]) -> dict[str, Any] | None:
    """Return a field `name: A[type, "help"]` or `name: A[type, Arg(...)] = default`."""
    annotation = node.annotation
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A"):
        return None
    assert isinstance(annotation.slice, ast.Tuple) and isinstance(node.target, ast.Name)
    type_, *extras = annotation.slice.elts
    call = next((extra for extra in extras if isinstance(extra, ast.Call)), None)
    given = keywords(call) if call is not None and ast.unparse(call.func) == "Arg" else {}
    if call is not None and ast.unparse(call.func) == "Derived":
        return None
    shape = shape_of(type_) or (Shape(kind="str") if "type_parser" in given else None)
    if "no_cli" in given or shape is None:
        return None
    if call is None:
        given = {"help": extras[0]}
    _refine(shape, given, names)
    name = _optional(given.get("cli_name"), names) or node.target.id.replace("_", "-")
    aliases = _optional(given.get("aliases"), names) or []
    options = [str(option).removeprefix("--") for option in (name, *aliases)]
    return _row(
        options, shape, _optional(node.value, names), _optional(given.get("help"), names) or ""
    )


def _refine(shape: Shape, given: dict[str, ast.expr], names: dict[str, Any]) -> None:
    parser = ast.unparse(given["type_parser"]).split(".")[-1] if "type_parser" in given else None
    if parser in _PARSERS:
        shape.kind, shape.many = _PARSERS[parser], False
    if "choices" in given:
        shape.choices = _optional(given["choices"], names) or []
    if "nargs" in given:
        shape.many = _optional(given["nargs"], names) in ("+", "*")
    if "LoRAPathAction" in ast.unparse(given.get("action", ast.Constant(None))):
        shape.many = True


def _added(call: ast.Call, names: dict[str, Any]) -> dict[str, Any] | None:
    """Return an option that `add_cli_args` registers by hand."""
    given = keywords(call)
    options = [str(evaluate(arg)).removeprefix("--") for arg in call.args]
    if options == ["config"]:
        return None
    action = ast.unparse(given["action"]).strip("'\"") if "action" in given else ""
    shape = Shape(kind=ast.unparse(given["type"]) if "type" in given else "str")
    if action == "store_true" or (action in _FLAG_ACTIONS and not {"type", "nargs"} & set(given)):
        shape = Shape(kind="bool")
    _refine(shape, given, names)
    return _row(options, shape, None, _optional(given.get("help"), names) or "")


def _row(options: list[str], shape: Shape, default: Any, help: str) -> dict[str, Any]:
    spelled = [f"--{PREFIX}{option}" for option in options]
    return {
        "name": (PREFIX + options[0]).replace("-", "_"),
        "kind": shape.kind,
        "default": default,
        "help": " ".join(help.split()),
        "choices": shape.choices,
        "many": shape.many,
        "options": spelled,
        "off_options": off_options(PREFIX, options[0]) if shape.kind == "bool" else [],
    }


def _optional(node: ast.expr | None, names: dict[str, Any]) -> Any:
    if node is None:
        return None
    try:
        return evaluate(node, names)
    except Unknown:
        return None
