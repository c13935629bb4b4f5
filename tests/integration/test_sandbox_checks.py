"""Where no sandbox can be made, slime says what to type; limits hold without isolation too."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

import pytest

from slime.core.errors import UserError
from slime.rollout.hooks import check_hooks
from slime.rollout.sandbox import Limits, check_sandbox, run_python
from slime.rollout.sandbox.bubblewrap import bwrap_arguments
from slime.rollout.sandbox.seccomp import build_filter
from slime.utils.http import run
from tests.args import make_args


@pytest.fixture
def open_folder():
    """A folder that every user can read, as the PATH must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_without_isolation_the_limits_of_a_program_hold():
    assert run(run_python("print(3)", isolate=False)).stdout == "3\n"
    began = time.monotonic()
    assert not run(run_python("while True: pass", time_limit_s=1.0, isolate=False)).ok
    assert time.monotonic() - began < 60
    done = run(run_python("x = bytearray(10 ** 9)", memory_bytes=200 << 20, isolate=False))
    assert "MemoryError" in done.stderr
    done = run(run_python("import os\nos.fork()", isolate=False))
    assert "PermissionError" in done.stderr


def test_a_traceback_names_no_random_folder():
    """It becomes part of the tokens that a model sees, which must not differ from run to run."""
    first, second = (run(run_python("import nothing_of_this_name")).stderr for _ in range(2))
    assert first == second and "ModuleNotFoundError" in first


@pytest.mark.parametrize(
    ("bwrap", "advice"),
    [
        (None, "apt-get install bubblewrap"),
        ("bwrap: Unknown option --disable-userns", "bubblewrap 0.8 or newer"),
        ("bwrap: No permissions to create new namespace", "--allow-unsandboxed-code"),
    ],
)
def test_a_system_without_sandbox_is_refused_at_start(monkeypatch, open_folder, bwrap, advice):
    if bwrap:
        (open_folder / "bwrap").write_text(f"#!/bin/sh\necho '{bwrap}' >&2\nexit 1\n")
        (open_folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(open_folder))
    check_sandbox.cache_clear()
    try:
        with pytest.raises(UserError, match=advice):
            check_hooks(make_args(rm_type="code"))
        check_hooks(make_args(rm_type="code", allow_unsandboxed_code=True))
    finally:
        check_sandbox.cache_clear()


def test_machines_without_a_filter_are_refused():
    with pytest.raises(UserError, match="riscv64"):
        build_filter(forks=False, network=False, machine="riscv64")
    assert build_filter(forks=False, network=False, machine="aarch64")


def test_a_working_directory_inside_a_shown_folder_is_hidden(monkeypatch):
    """Data files lie there. System folders are not hidden, or nothing would run."""
    assert set(_hidden()) <= {"/usr/src"}
    for folder, hidden in (("/usr/games", True), ("/usr/lib", False), ("/usr", False)):
        if Path(folder).is_dir():
            monkeypatch.chdir(folder)
            assert (folder in _hidden()) is hidden


def _hidden():
    words = bwrap_arguments(["true"], limits=Limits())
    tmpfs = [path for word, path in itertools.pairwise(words) if word == "--tmpfs"]
    return [path for path in tmpfs if path != "/tmp"]
