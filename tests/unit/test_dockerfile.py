"""The Dockerfile, read and not built: pinned, with packages of registries alone, for a normal user."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_stages() -> list[list[tuple[str, str]]]:
    """(instruction, argument) of each stage, the lines of an instruction joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, argument = line.split(None, 1)
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, argument))
    return stages


STAGES = read_stages()
COMMANDS = [
    shlex.split(command)
    for stage in STAGES
    for name, argument in stage
    if name == "RUN"
    for command in argument.split("&&")
]


def test_bases_are_pinned_and_the_default_one_by_digest():
    bases = [dict(stage)["FROM"].split()[0] for stage in STAGES]
    assert re.fullmatch(r"[\w/.-]+:[\w.-]+@sha256:[0-9a-f]{64}", bases[-1])
    for base in bases:
        tag = base.split("@")[0].partition(":")[2]
        assert re.search(r"\d+\.\d+", tag), f"{base} has no version"


@pytest.mark.parametrize("stage", STAGES, ids=[dict(stage)["FROM"] for stage in STAGES])
def test_everything_but_system_packages_is_done_by_a_normal_user(stage):
    users = [argument for name, argument in stage if name == "USER"]
    assert len(users) == 1 and users[0] not in ("root", "0")
    before = [argument for name, argument in stage[: stage.index(("USER", users[0]))]]
    assert any(re.search(rf"useradd .*--uid [1-9]\d+ {users[0]}\b", text) for text in before)
    names = [name for name, _ in stage]
    first = names.index("USER")
    assert all(name in ("FROM", "RUN") for name in names[:first])
    assert not any("pip" in argument for _, argument in stage[:first])
    copies = [argument for name, argument in stage if name == "COPY"]
    assert copies and all(argument.startswith(f"--chown={users[0]} ") for argument in copies)


def test_what_is_copied_and_called_exists():
    for stage in STAGES:
        for name, argument in stage:
            if name == "COPY":
                *sources, _ = argument.split()[1:]
                assert all((ROOT / source).exists() for source in sources)
        command, subcommand = json.loads(dict(stage)["CMD"])
        assert command in PROJECT["scripts"]
        assert subcommand in (ROOT / "slime" / "cli" / "__init__.py").read_text()


def test_every_package_is_pinned():
    constraints = (ROOT / "constraints.txt").read_text()
    for words in COMMANDS:
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words[:2] == ["pip", "install"]:
            assert not any(
                re.search(r"://|^-(e|f|i)$|index-url|find-links|git\+", w) for w in words
            )
            skipped = {w for flag, w in itertools.pairwise(words) if flag == "--constraint"}
            for word in words[2:]:
                if word.startswith("-") or word in skipped:
                    continue
                held = re.search(rf"^{re.escape(word)}==", constraints, re.M) and skipped
                assert "==" in word or held, f"{word} has no version"
        elif words[0] == "tools/install.sh":  # by hash, see test_lock.py
            assert set(words[2].split(",")) <= PROJECT["optional-dependencies"].keys()
            assert (ROOT / words[0]).stat().st_mode & 0o100
        else:
            assert words[0] in ("apt-get", "rm", "useradd", "install", "python", "python3"), words


def test_secrets_and_runs_stay_outside_of_the_image():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".env", ".venv", "runs"} <= set(ignored)
    assert not re.search(r"(?i)token|password|secret|api_key", (ROOT / "Dockerfile").read_text())
