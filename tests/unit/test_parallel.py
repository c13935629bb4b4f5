"""Which tests one process runs when the suite is split over several."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import FIRST, TOGETHER, made_once, unit_of_work

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_stays_together_and_so_do_those_that_share_a_server():
    assert unit_of_work("tests/unit/test_a.py::test_b[c::d]") == "tests/unit/test_a.py"
    alone = {unit_of_work(f"{path}test_a.py::test_b") for path in ("tests/e2e/", "tests/unit/")}
    assert len(alone) == 2
    conformance = {unit_of_work(f"tests/conformance/test_{name}.py::test_b") for name in "ac"}
    assert len(conformance) == 1


def test_a_folder_is_made_once_and_again_only_after_a_failure(tmp_path_factory, tmp_path):
    name = tmp_path.name + "-shared"
    attempts = []

    def make(folder: Path) -> None:
        folder.mkdir()
        attempts.append(folder)
        if len(attempts) == 1:
            raise ValueError("the first attempt fails")

    with pytest.raises(ValueError):
        made_once(tmp_path_factory, name, make)
    folders = {made_once(tmp_path_factory, name, make) for _ in range(2)}
    assert folders == set(attempts) and len(attempts) == 2


def test_every_named_path_is_there():
    assert [path for path in (*FIRST, *TOGETHER) if not (ROOT / path).exists()] == []
