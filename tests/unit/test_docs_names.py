"""What the pages name is there: files that links and paths point to, flags, modules."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from slime.config.flags.registry import all_flags

ROOT = Path(__file__).parents[2]
# docs/LOG.md tells of what was.
PAGES = [
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"))
    if path.name != "LOG.md"
]
_CODE = ("slime", "tools", "scripts", "benchmarks", "tests")
# Of py-spy, ray, torchrun and docker.
_FOREIGN = {
    "--pid",
    "--generate",
    "--master-addr",
    "--master-port",
    "--rm",
    "--target",
    "--shm-size",
}
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+(?![\w-])")
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_PATH = re.compile(r"`((?:slime|tests|tools|scripts|docs|benchmarks|examples)/[\w./{},*-]+\w)`")
_MODULE = re.compile(r"\bslime(?:\.[A-Za-z_]\w*){2,}")


@pytest.fixture(scope="module")
def known() -> set[str]:
    """Flags of train.py, and whatever any script of the repository spells."""
    flags = {flag.option for flag in all_flags().values()}
    flags |= {f"--no-{option.removeprefix('--')}" for option in flags}
    for folder in _CODE:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".sbatch") and path != Path(__file__):
                flags |= set(_FLAG.findall(path.read_text()))
    return flags | _FOREIGN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_exist(page: Path, known: set[str]):
    if page.name in (
        "migrating.md",
        "arguments.md",
    ):  # which quote others' flags, and are tested elsewhere
        return
    assert sorted(set(_FLAG.findall(page.read_text())) - known) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path):
    text = page.read_text()
    links = [link for link, _ in _LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    paths = [path for spelt in _PATH.findall(text) for path in expanded(spelt)]
    assert [path for path in paths if not any(ROOT.glob(path))] == []


def expanded(path: str) -> list[str]:
    """`a_{b,c}.py` names two files."""
    choice = re.search(r"\{([^{}]*,[^{}]*)\}", path)
    if choice is None:
        return [path]
    ends = [path[: choice.start()] + part + path[choice.end() :] for part in choice[1].split(",")]
    return [name for end in ends for name in expanded(end)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_and_functions_exist(page: Path):
    for name in set(_MODULE.findall(page.read_text())):
        module, _, attribute = name.rpartition(".")
        try:
            found = hasattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError:
            found = False
        assert found or importlib.util.find_spec(name), name


def test_the_architecture_names_files_and_functions_that_exist():
    """In its diagrams too; a function stands after its file: `slime/core/a.py` `f`."""
    text = (ROOT / "docs/architecture.md").read_text()
    files = set(re.findall(r"slime/[\w/]+\.py", text))
    assert [name for name in sorted(files) if not (ROOT / name).is_file()] == []
    pairs = re.findall(r"`(slime/[\w/]+\.py)` `(_?\w+)`", text)
    pairs += re.findall(r"(slime/[\w/]+\.py) (\w+) ─▶", text)
    assert len(pairs) > 40
    wrong = [(f, n) for f, n in pairs if not re.search(rf"\b{n}\b", (ROOT / f).read_text())]
    assert wrong == []


def test_the_changelog_has_each_section_once_and_in_order():
    """The order is that of Keep a Changelog."""
    order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for version in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        sections = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert sections == [name for name in order if name in sections]


def test_the_first_screen_of_the_readme_shows_the_product():
    """What it is, a picture of the page, two commands, at most eight lines of Python."""
    screen = (ROOT / "README.md").read_text().split("\n## ")[0]
    picture = re.search(r"!\[.*\]\((docs/images/.+)\)", screen)
    assert picture is not None and (ROOT / picture[1]).is_file()
    commands, python = re.findall(r"```\w*\n(.*?)```", screen, re.DOTALL)
    assert len(commands.splitlines()) == 2 and commands.endswith("make quickstart\n")
    assert python.startswith("import slime\n")
    assert len([line for line in python.splitlines() if line]) <= 8
    assert screen.index(picture[0]) < screen.index(commands) < screen.index(python)
