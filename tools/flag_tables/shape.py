"""From a field's annotation to the kind of value its flag takes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from flag_tables.source import evaluate

_KINDS = {
    "str": "str",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "dict": "json",
    "Dict": "json",
}
_LISTS = ("list", "List", "tuple", "Tuple")


@dataclass(kw_only=True)
class Shape:
    kind: str
    many: bool = False
    choices: list[str | int | float] = field(default_factory=list)


def shape_of(annotation: ast.expr, enums: dict[str, list[str]] | None = None) -> Shape | None:
    """Return the shape of a type; None for what no command line can give: callables, torch objects, records."""
    match annotation:
        case ast.Constant(value=str(text)):
            return shape_of(ast.parse(text, mode="eval").body, enums)
        case ast.Name(id=name) if name in (enums or {}):
            return Shape(kind="str", choices=[*(enums or {})[name]])
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _KINDS:
            return Shape(kind=_KINDS[name])
        case ast.Name(id=name) if name in _LISTS:
            return Shape(kind="str", many=True)
        case ast.Attribute(value=ast.Name(id="torch"), attr="dtype"):
            return Shape(kind="str")
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return shape_of(inner, enums)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = evaluate(inner)
            return Shape(kind="str", choices=values if isinstance(values, list) else [values])
        case ast.Subscript(value=ast.Name(id=name), slice=inner) if name in _LISTS:
            first = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
            element = shape_of(first, enums) or Shape(kind="str")
            return Shape(kind=element.kind, many=True, choices=element.choices)
        case ast.Subscript(value=ast.Name(id="Dict" | "dict")):
            return Shape(kind="json")
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            return _union(parts, enums)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _union([left, right], enums)
    return None


def _union(parts: list[ast.expr], enums: dict[str, list[str]] | None) -> Shape | None:
    """Return the shape of a union: X | None is X; X | list[X] takes one or more; a mixture is text that the package reads itself."""
    named = [p for p in parts if not (isinstance(p, ast.Constant) and p.value is None)]
    shapes = [shape_of(part, enums) for part in named]
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return None
    if len({shape.kind for shape in known}) == 1:
        many = any(shape.many for shape in known)
        return Shape(kind=known[0].kind, many=many, choices=known[0].choices)
    return Shape(kind="str")
