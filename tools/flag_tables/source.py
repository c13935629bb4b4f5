"""A package's sources and the few Python expressions that its defaults, types and help texts use."""

from __future__ import annotations

import ast
import operator
import zipfile
from pathlib import Path
from typing import Any

_OPERATORS = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.FloorDiv: operator.floordiv,
}


class Unknown(Exception):
    """An expression whose value the text alone does not tell."""


class Source:
    """The modules of one wheel."""

    def __init__(self, wheel: Path) -> None:
        self._archive = zipfile.ZipFile(wheel)
        self.package, self.version = wheel.name.split("-")[:2]

    def module(self, path: str) -> ast.Module:
        return ast.parse(self._archive.read(path))

    def modules_under(self, folder: str) -> list[ast.Module]:
        names = [n for n in self._archive.namelist() if n.startswith(folder) and n.endswith(".py")]
        return [self.module(name) for name in sorted(names)]


def find_class(module: ast.Module, name: str) -> ast.ClassDef:
    return next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name)


def find_function(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)


def constants(module: ast.Module) -> dict[str, Any]:
    """Return the module's names whose values are plain lists, strings and numbers."""
    found: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = evaluate(node.value, found)
            except Unknown:
                continue
    return found


def evaluate(node: ast.expr, names: dict[str, Any] | None = None) -> Any:
    """Return the value of a simple expression; `names` are those it may use."""
    names = names or {}
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [evaluate(item, names) for item in items]
        case ast.Dict(keys=[], values=[]):
            return {}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand, names)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](evaluate(left, names), evaluate(right, names))
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, names) for part in parts)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Attribute() if ast.unparse(node) in names:
            return names[ast.unparse(node)]
    raise Unknown(ast.unparse(node))


def keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {k.arg: k.value for k in call.keywords if k.arg}


def _text(part: ast.expr, names: dict[str, Any]) -> str:
    if isinstance(part, ast.FormattedValue):
        try:
            return str(evaluate(part.value, names))
        except Unknown:
            return "..."
    return str(evaluate(part, names))
