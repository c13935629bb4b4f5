"""Generate docs/reference.md from records and hook protocols: `python tools/write_reference_docs.py`."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.compat.batches import ATTRIBUTES
from slime.config.flags.registry import own_flags
from slime.config.flags.spec import option_of
from slime.core.types import RolloutBatch, Sample, Status, TrainBatch
from slime.rollout import base_types
from slime.rollout.hooks import HOOKS

PATH = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
COMMAND = "python tools/write_reference_docs.py"

_INTRODUCTION = f"""\
<!-- Written by `{COMMAND}`; change the classes and their comments instead. -->

# Reference of hooks and records

Signatures of all hooks and fields of the records that they receive and return, generated from the code. What each hook is
for, with an example: [customization](customization.md). Parameters with a default may be left out of a hook, and annotations
are not needed. `Group` is `list[Sample]`, `Reward` is `float | dict[str, Any]`, and `batch` of a loss function is a `TrainBatch`.

Shapes: `N` samples, `P` prompt tokens, `R` response tokens of a sample, `T` tokens of a packed micro-batch.
"""
_RECORDS = (
    ("slime.utils.types", (Sample, RolloutBatch, TrainBatch)),
    (
        "slime.rollout.base_types",
        (
            base_types.RolloutFnTrainOutput,
            base_types.RolloutFnEvalOutput,
            base_types.EvalResult,
            base_types.DynamicFilterOutput,
        ),
    ),
)
_KEYS = """\
Trainer hooks may also read and set columns by key, as in `rollout_data["advantages"]`. Keys are the field names, and these:
"""


def reference_page() -> str:
    sections = [_INTRODUCTION, "## Hooks\n", *(_hook(name, HOOKS[name]) for name in HOOKS)]
    sections.append("## Records\n")
    for module, records in _RECORDS:
        sections += [_record(module, record) for record in records]
    return "\n".join(sections)


def _hook(name: str, protocol: type) -> str:
    signatures = [_signatures(protocol)]
    if name == "custom_rm_path":
        signatures.append(_signatures(base_types.GroupRewardFunction) + "  # with --group-rm")
    flag = option_of(name)
    code = "\n".join(signatures)
    return f"### `{flag}`\n\n{_sentence(own_flags()[name].help)}\n\n```python\n{code}\n```\n"


def _signatures(protocol: type) -> str:
    """Return the methods of a Protocol as they are written; the only one of a hook is called `fn`."""
    methods = [node for node in _class(protocol)[0].body if isinstance(node, _FUNCTIONS)]
    if [method.name for method in methods] == ["__call__"]:
        return _signature(methods[0], "fn")
    return "\n".join(_signature(method, method.name, keep_self=True) for method in methods)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _signature(
    node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, *, keep_self: bool = False
) -> str:
    arguments = node.args
    if not keep_self:
        arguments.args = [argument for argument in arguments.args if argument.arg != "self"]
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{kind} {name}({ast.unparse(arguments)}){result}"


def _record(module: str, record: type) -> str:
    node, comments = _class(record)
    rows = _fields(node, comments)
    head = ["field", "type and default", "meaning", "set by"]
    while not any(row[-1] for row in rows):  # a column without an entry
        head, rows = head[:-1], [row[:-1] for row in rows]
    lines = [f"### `{module}.{record.__name__}`", "", *_docstring(record)]
    lines += [_line(head), _line(["---"] * len(head)), *map(_line, rows), ""]
    return "\n".join([*lines, *_methods(node), *_extra(record)])


def _fields(node: ast.ClassDef, comments: dict[int, str]) -> list[list[str]]:
    """Return name, type, meaning and who sets it; meanings are the comments beside and above a field."""
    rows, group, previous = [], "", node.lineno
    for item in node.body:
        first, last = item.lineno, item.end_lineno or item.lineno
        above = _comment(comments, previous + 1, first)
        beside = _comment(comments, first, last + 1)
        previous = last
        if not isinstance(item, ast.AnnAssign):
            continue
        if above.startswith("set by "):  # heads the fields below
            group, above = above.removeprefix("set by "), ""
        meaning = _plain(beside or above)
        rows.append([f"`{ast.unparse(item.target)}`", _type(item), meaning, group])
    return rows


def _comment(comments: dict[int, str], start: int, stop: int) -> str:
    return " ".join(comments[line] for line in range(start, stop) if line in comments)


def _methods(node: ast.ClassDef) -> list[str]:
    """Return the public methods and properties that have a docstring, with its first paragraph."""
    rows = []
    for item in node.body:
        if not isinstance(item, _FUNCTIONS) or item.name.startswith("_"):
            continue
        decorators = [ast.unparse(one) for one in item.decorator_list]
        if any(one.endswith(".setter") for one in decorators):
            continue
        is_property = "property" in decorators
        spelt = item.name if is_property else f"{item.name}{_call(item)}"
        if text := ast.get_docstring(item):
            rows.append([f"`{spelt}`", _plain(text.split("\n\n")[0].replace("\n", " "))])
    if not rows:
        return []
    return [_line(["method or property", "meaning"]), _line(["---"] * 2), *map(_line, rows), ""]


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    names = [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")]
    names += [f"{arg.arg}=" for arg in node.args.kwonlyargs]
    return f"({', '.join(names)})"


def _extra(record: type) -> list[str]:
    if record is Sample:
        values = ", ".join(f"`{one.name}`" for one in Status)
        return [f"`Status`, also as `Sample.Status`: {values}.", ""]
    if record is RolloutBatch:
        rows = [[f"`{key}`", f"`{field}`"] for key, field in ATTRIBUTES.items()]
        return [_KEYS, _line(["key", "field"]), _line(["---"] * 2), *map(_line, rows), ""]
    return []


def _class(kind: type) -> tuple[ast.ClassDef, dict[int, str]]:
    """Return the class as written, and its comments by line."""
    source = textwrap.dedent(inspect.getsource(kind))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    return node, comments


def _docstring(record: type) -> list[str]:
    """Return the docstring as Markdown: `::` starts a block of code there."""
    text = inspect.getdoc(record) or ""
    if not text or text.startswith(f"{record.__name__}("):  # the one that dataclass writes
        return []
    return [text.replace("::\n", ":\n"), ""]


def _type(item: ast.AnnAssign) -> str:
    default = item.value
    if isinstance(default, ast.Call):  # field(default_factory=list)
        factory = default.keywords[0].value
        shown = " = " + {"list": "[]", "dict": "{}"}[ast.unparse(factory)]
    else:
        shown = "" if default is None else f" = {ast.unparse(default)}"
    return f"`{ast.unparse(item.annotation)}{shown}`"


def _sentence(text: str) -> str:
    text = text if "fn(" in text[:9] else text[:1].upper() + text[1:]
    return f"{text.removesuffix('.')}."


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PATH.write_text(reference_page())
    print(f"wrote {PATH}")
