"""Every flag that docs/migrating.md names as ours exists."""

from __future__ import annotations

import re
from pathlib import Path

from slime.config.flags.registry import all_flags

TEXT = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()


def our_flags():
    for line in TEXT.splitlines():
        cells = line.split("|")[1:-1]
        if len(cells) == 2:  # slime's own table: both columns are ours
            yield from re.findall(r"`--([a-z0-9-]+)", line)
        elif len(cells) == 3:
            yield from re.findall(r"`--([a-z0-9-]+)", cells[1])


def test_flags_named_as_ours_exist():
    named = set(our_flags())
    assert len(named) > 60
    known = {name.replace("_", "-") for name in all_flags()}
    assert {name for name in named if name not in known and name != "no-"} == set()
