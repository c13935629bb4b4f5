"""Write requirements.lock: every pin of constraints.txt with the hashes of its files and who needs it.

    .venv/bin/python tools/lock.py      after a change of constraints.txt, in a complete development environment

One file serves every supported platform: a line names the hashes of all Linux wheels for the supported
Pythons, and of the source archive. tools/install.sh installs the lines of the extras it is asked for with
`pip install --require-hashes`. torch and what only its CUDA build needs are not in it: their files differ
between the index of the machine and PyPI, and tools/install.sh installs them first.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, cast

import tomllib  # pyright: ignore[reportMissingImports]
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pip._internal.commands import create_command
from pip._internal.models.wheel import Wheel

ROOT = Path(__file__).resolve().parent.parent
SEPARATE = re.compile(r"torch$|nvidia-|cuda-")  # installed together with torch
WHEEL = re.compile(r"-(py3|py2\.py3|cp31[0-3]|cp3\d)-.*-(any|.*linux.*(x86_64|aarch64))\.whl$")
HEADER = "# Written by tools/lock.py from constraints.txt; after # stand the extras that need it.\n"


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = {"base": project["project"]["dependencies"] + project["build-system"]["requires"]}
    groups |= project["project"]["optional-dependencies"]
    needed = {group: closure(names) for group, names in groups.items()}
    lines = []
    for pin in pins():
        name = canonicalize_name(pin.name)
        users = [group for group, names in needed.items() if name in names]
        if users and not SEPARATE.match(name):
            users = ["base"] if "base" in users else users
            lines.append(line(pin, file_hashes(pin), users))
    (ROOT / "requirements.lock").write_text(HEADER + "".join(lines))


def pins() -> list[Requirement]:
    text = (ROOT / "constraints.txt").read_text()
    return [Requirement(row) for row in text.splitlines() if row and not row.startswith("#")]


def closure(requirements: list[str]) -> set[str]:
    """Return the names of all packages that these need on Linux, whatever the Python version."""
    found: set[str] = set()
    seen = set()
    queue = [Requirement(text) for text in requirements]
    while queue:
        requirement = queue.pop()
        key = (canonicalize_name(requirement.name), *sorted(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found.add(key[0])
        try:
            rows = distribution(requirement.name).requires or []
        except PackageNotFoundError:  # of another Python version
            continue
        queue += [r for r in map(Requirement, rows) if applies(r, requirement.extras)]
    return found


def applies(requirement: Requirement, extras: set[str]) -> bool:
    if requirement.marker is None:
        return True
    versions = ("3.10", "3.11", "3.12", "3.13")
    return any(
        requirement.marker.evaluate(
            {
                **cast(dict[str, str], default_environment()),
                "extra": extra,
                "python_version": v,
                "python_full_version": f"{v}.1",
            }
        )
        for extra in extras or {""}
        for v in versions
    )


def file_hashes(pin: Requirement) -> list[str]:
    """Return the hashes that the configured package index gives for the files of a pinned version."""
    version = str(pin.specifier).removeprefix("==")
    found = set()
    for candidate in FINDER.find_all_candidates(pin.name):
        name = candidate.link.filename
        if str(candidate.version) == version and (WHEEL.search(name) or name.endswith(".tar.gz")):
            found.add(candidate.link.hash)
    found.discard(None)
    if not found:
        sys.exit(f"the package index has no file with a hash of {pin}")
    return sorted(found)


def make_finder():
    """Return pip's own search of the configured index, which then lists files of every platform."""
    Wheel.supported = lambda self, tags: True
    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-deps", "--ignore-requires-python", "x"])
    session = command._build_session(options)
    return command._build_package_finder(options, session, ignore_requires_python=True)


def line(pin: Requirement, hashes: list[str], users: list[str]) -> str:
    marker = f" ; {pin.marker}" if pin.marker else ""
    rows = "".join(f" \\\n    --hash=sha256:{value}" for value in hashes)
    return f"# {','.join(users)}\n{pin.name}{pin.specifier}{marker}{rows}\n"


FINDER = make_finder()

if __name__ == "__main__":
    main()
