"""docs/seeds.md has one row for everything the documents name, and no other."""

from __future__ import annotations

import ast
import re

import pytest

from tests.seeds import documents
from tests.seeds.documents import ROOT, rows

NAMED = {
    "Commands and snippets": {q.place: [q.place] for q in documents.snippets()},
    "Classes and methods": {name: [place] for name, (place, _) in documents.methods().items()},
    "Files, modules and functions": documents.paths(),
    "Environment variables": documents.variables(),
    "Models": documents.models(),
    "Flags": documents.flags(),
}


@pytest.mark.parametrize("section", NAMED)
def test_rows_and_documents_agree(section):
    found = {name: row.places for name, row in rows(section).items()}
    if section == "Commands and snippets":  # whose second cell says what stands there
        assert list(found) == list(NAMED[section])
    else:
        assert found == {name: ", ".join(places) for name, places in NAMED[section].items()}


def test_nothing_fails_unnoticed():
    failing = [row.name for section in NAMED for row in rows(section).values() if row.fails]
    assert failing == []


@pytest.mark.parametrize("section", NAMED)
def test_what_shows_a_row_exists(section):
    for row in rows(section).values():
        for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", row.shown_by):
            tree = ast.parse((ROOT / "tests" / file).read_text())
            assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, row
        assert "::" in row.shown_by or not row.state.startswith("works"), row
