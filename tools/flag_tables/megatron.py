"""Megatron-core's configuration dataclasses as flags, with Megatron's own spellings for some."""

from __future__ import annotations

import ast
from typing import Any

from flag_tables.shape import Shape, shape_of
from flag_tables.source import Source, Unknown, evaluate, find_class, keywords

# where each dataclass is; TransformerConfig inherits the fields of ModelParallelConfig
CLASSES = {
    "ModelParallelConfig": "megatron/core/model_parallel_config.py",
    "TransformerConfig": "megatron/core/transformer/transformer_config.py",
    "MLATransformerConfig": "megatron/core/transformer/transformer_config.py",
    "OptimizerConfig": "megatron/core/optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "megatron/core/distributed/distributed_data_parallel_config.py",
}
ENUMS = "megatron/core/transformer/enums.py"


def read_megatron(source: Source) -> list[dict[str, Any]]:
    """Return one row per field that a command line can set; a field of several classes sets them all."""
    enums = _enums(source.module(ENUMS))
    rows: dict[str, dict[str, Any]] = {}
    for owner, path in CLASSES.items():
        body = find_class(source.module(path), owner).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                row = _row(node, _docstring(following), owner, enums)
                if row is not None and node.target.id in rows:
                    known = rows[node.target.id]
                    known["sets"] = list(dict.fromkeys([*known["sets"], *row["sets"]]))
                elif row is not None:
                    rows[node.target.id] = row
    return list(rows.values())


def _row(
    node: ast.AnnAssign, help: str, owner: str, enums: dict[str, list[str]]
) -> dict[str, Any] | None:
    shape = shape_of(node.annotation, enums)
    if shape is None:
        return None
    assert isinstance(node.target, ast.Name)
    name = node.target.id
    default, spelling = _default_and_spelling(node.value)
    return {
        "name": name,
        "kind": shape.kind,
        "default": default,
        "help": help,
        "choices": shape.choices,
        "many": shape.many,
        "sets": [f"{owner.replace('ModelParallel', 'Transformer')}.{name}"],
        **_options(name, shape, default, spelling),
    }


def _options(name: str, shape: Shape, default: Any, spelling: str | None) -> dict[str, Any]:
    """Return a field's options: Megatron spells some otherwise, and one that is on by default by its off switch."""
    plain = "--" + name.replace("_", "-")
    off = [f"--no-{plain[2:]}"] if shape.kind == "bool" else []
    if spelling is None:
        return {"options": [plain], "off_options": off}
    if shape.kind == "bool" and default is True:
        return {"options": [plain], "off_options": [spelling, *(o for o in off if o != spelling)]}
    attribute = spelling.removeprefix("--").replace("-", "_")
    return {"name": attribute, "options": [spelling, plain], "off_options": off}


def _default_and_spelling(value: ast.expr | None) -> tuple[Any, str | None]:
    spelling = None
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
        given = keywords(value)
        if "metadata" in given:
            metadata = ast.literal_eval(given["metadata"])["argparse_meta"]
            spelling = metadata.get("arg_names", [None])[0]
        value = given.get("default")
    if value is None:
        return None, spelling
    if isinstance(value, ast.Attribute):  # AttnBackend.auto, torch.float32
        return value.attr, spelling
    try:
        return evaluate(value), spelling
    except Unknown:
        return None, spelling


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _enums(module: ast.Module) -> dict[str, list[str]]:
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    return {
        node.name: [n.targets[0].id for n in node.body if isinstance(n, ast.Assign)]  # type: ignore
        for node in classes
        if any(ast.unparse(base).endswith("Enum") for base in node.bases)
    }
