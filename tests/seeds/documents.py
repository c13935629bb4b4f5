"""What the three documents name, extracted from quotes of them, and the rows of docs/seeds.md.

quotes/*.txt hold what a reader types or looks up, verbatim but for whitespace that the pages had
lost: blocks of "@LINE KIND" and the text that stands at that line of the document.

    train      flags of train.py: an array of flags, or a command
    shell      other commands
    python     imports, classes, calls
    flag       a flag with its type and default
    words      sentences that name flags
    variables, model, source
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "seeds.md"
DOCUMENTS = ("distributed", "glm45", "backends")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_OF_RAY = {"--address", "--runtime-env-json", "--force"}
_VARIABLE = re.compile(r"^export (\w+)=|Set (\w+) and (\w+)", re.MULTILINE)
_PATH = re.compile(r"(?:slime|tools|scripts)/[\w./-]+\w|slime(?:\.\w+){3,}")


@dataclass(frozen=True)
class Quote:
    document: str
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


def quotes(*kinds: str) -> list[Quote]:
    """Return all quotes of these kinds, in the order of the documents."""
    found = []
    for document in DOCUMENTS:
        text = (Path(__file__).parent / "quotes" / f"{document}.txt").read_text()
        for block in re.split(r"^@", text, flags=re.MULTILINE)[1:]:
            head, _, body = block.partition("\n")
            line, kind = head.split()
            if not kinds or kind in kinds:
                found.append(Quote(document, int(line), kind, body.strip()))
    return found


def quote(place: str) -> Quote:
    return next(found for found in quotes() if found.place == place)


def flags() -> dict[str, list[str]]:
    """Return every flag of train.py with the places that name it."""
    found: dict[str, list[str]] = {}
    for q in quotes("train", "flag", "words"):
        for name in _FLAG.findall(q.text):
            if name not in _OF_RAY and q.place not in found.setdefault(name, []):
                found[name].append(q.place)
    return dict(sorted(found.items()))


def methods() -> dict[str, tuple[str, ast.FunctionDef]]:
    """Return the documented methods as `Class.method(parameters)`, each with its place and syntax."""
    found = {}
    for q in quotes("python"):
        for owner in ast.parse(q.text).body:
            if isinstance(owner, ast.ClassDef):
                for method in owner.body:
                    assert isinstance(method, ast.FunctionDef)
                    name = f"{owner.name}.{method.name}({_parameters(method)})"
                    found[name] = (q.place, method)
    return found


def _parameters(method: ast.FunctionDef) -> str:
    return ast.unparse(method.args).removeprefix("self").removeprefix(", ")


def paths() -> dict[str, list[str]]:
    """Return files, folders, modules and functions of the repository that the documents name."""
    found: dict[str, list[str]] = {}
    for q in quotes():
        for name in _PATH.findall(q.text):
            if q.place not in found.setdefault(name, []):
                found[name].append(q.place)
    return dict(sorted(found.items()))


def variables() -> dict[str, list[str]]:
    """Return the environment variables that the documents set."""
    found: dict[str, list[str]] = {}
    for q in quotes("shell", "variables", "words"):
        for name in filter(None, (n for groups in _VARIABLE.findall(q.text) for n in groups)):
            if q.place not in found.setdefault(name, []):
                found[name].append(q.place)
    return dict(sorted(found.items()))


def models() -> dict[str, list[str]]:
    """Return the models of the lists of supported ones."""
    found: dict[str, list[str]] = {}
    for q in quotes("model"):
        for line in re.findall(r"• (.*)", q.text):
            parts = [line] if "(" in line else line.split(", ")
            for name in parts:
                found.setdefault(name, []).append(q.place)
    return found


def snippets() -> list[Quote]:
    """Return what a reader runs: commands, arrays of flags, Python."""
    return quotes("train", "shell", "python", "variables")


@dataclass(frozen=True)
class Row:
    name: str
    places: str
    state: str
    shown_by: str

    @property
    def fails(self) -> str | None:
        """Return the reason if the row says that this does not work yet."""
        return self.state.removeprefix("fails: ") if self.state.startswith("fails: ") else None


def expect_failure(request: pytest.FixtureRequest, section: str, name: str) -> None:
    """Mark the test as an expected failure, with the reason, if the row says so."""
    if reason := rows(section)[name].fails:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


def rows(section: str) -> dict[str, Row]:
    """Return the rows of one section of docs/seeds.md by their first cell."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    found = [Row(name.strip("| `"), *rest) for name, *rest in cells]
    assert len({row.name for row in found}) == len(found), f"{section}: a row is there twice"
    return {row.name: row for row in found}
