"""The engine of `run.generate`: it ends with its parent, and one that never gets ready is stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from slime.core.errors import UserError
from slime.serving.local_engine import _engine, generate_texts
from tests.forked import start_forked
from tests.waiting import wait_for


@pytest.fixture
def hanging_python(tmp_path: Path) -> Path:
    """An interpreter that writes its process id, prints a line and sleeps."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho loading\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    script.chmod(0o755)
    return script


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pid(folder: Path) -> int:
    wait_for(lambda: (folder / "pid").exists() and (folder / "pid").read_text().endswith("\n"))
    return int((folder / "pid").read_text())


def test_an_engine_that_hangs_while_loading_is_stopped(
    hanging_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", str(hanging_python))
    with (
        pytest.raises(UserError, match="for m was not ready after 1 s: loading"),
        _engine(Path("m"), start_timeout_s=1),
    ):
        pass
    assert not is_running(read_pid(tmp_path))


def test_an_engine_ends_when_its_parent_is_killed(hanging_python: Path, tmp_path: Path):
    parent = start_forked(generate, hanging_python)
    pid = read_pid(tmp_path)
    try:
        assert is_running(pid)
        parent.kill()
        parent.join()
        wait_for(lambda: not is_running(pid))
    finally:
        if is_running(pid):
            psutil.Process(pid).kill()


def generate(python: Path) -> None:
    sys.executable = str(python)
    generate_texts(Path("m"), ["x"], {})
