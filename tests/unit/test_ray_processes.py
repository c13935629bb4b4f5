"""Processes of a run's own Ray are ended by their session, its folder is closed to others and removed."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from slime.core.errors import UserError
from slime.diagnosis.ray_processes import (
    PrivateFolder,
    RayProcess,
    end_sessions,
    identify,
    remove_stale_folders,
    session_members,
)
from slime.ray.local_ray import check_version
from tests.other_user import NOBODY, as_user, needs_root
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
# A leader that dies at once and leaves a process which nobody but its session knows, deaf to SIGTERM.
LEADER = """
import os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(600)
os._exit(0)
"""
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from slime.diagnosis.ray_processes import Keeper
keeper = Keeper(Path(sys.argv[1]))
ray = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=1, start_new_session=True)
keeper.add("raylet", ray.pid)
time.sleep(600)
"""


@pytest.fixture
def leader():
    """The leader of a session, and the pid of the process it has left behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    known = identify("raylet", process.pid)
    assert process.stdout is not None
    left = int(process.stdout.readline())
    yield known, left
    process.wait()
    if _is_alive(left):
        os.kill(left, signal.SIGKILL)


def test_what_a_dead_leader_left_is_ended(leader):
    known, left = leader
    assert session_members([known]) == [left]
    end_sessions([known], grace_s=0.1)
    wait_for(lambda: not _is_alive(left))


def test_a_later_process_with_the_same_pid_is_left_alone(leader):
    known, left = leader
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    other = RayProcess(name="raylet", pid=sleeper.pid, started=known.started - 1)
    assert not other.running() and session_members([other]) == []
    assert _is_alive(left) and session_members([identify("raylet", sleeper.pid)]) == [sleeper.pid]
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize("group", [False, True], ids=["driver", "group"])
def test_the_keeper_outlives_a_killed_driver(tmp_path, group):
    folder = tmp_path / "ray"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), LEADER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    left = int(driver.stdout.readline())
    os.killpg(driver.pid, signal.SIGKILL) if group else driver.kill()
    driver.wait()
    wait_for(lambda: not _is_alive(left), timeout=10)
    wait_for(lambda: not folder.exists(), timeout=10)


@pytest.fixture
def short(monkeypatch):
    """A temporary folder of the test's own whose path leaves room for a socket's."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_others_cannot_read_the_token(short):
    before = os.umask(0)
    try:
        folder = PrivateFolder()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.token_path.stat().st_mode) == 0o600
    assert len(folder.token_path.read_text()) == 64
    folder.close()


@needs_root
def test_other_users_are_kept_out(short):
    folder = PrivateFolder()
    short.chmod(0o755)
    for attempt in (_read, os.listdir):
        with pytest.raises(AssertionError, match="PermissionError"):
            as_user(
                NOBODY, attempt, str(folder.path if attempt is os.listdir else folder.token_path)
            )
    folder.close()


def test_a_folder_that_nobody_holds_goes_and_others_stay(short):
    left, held = PrivateFolder(), PrivateFolder()
    left.close()
    for path in (left.path, held.path):
        os.utime(path, (time.time() - 3600,) * 2)
    remove_stale_folders(short)
    assert not left.path.exists() and held.path.exists()
    held.close()


def test_a_long_path_leaves_room_for_sockets(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = PrivateFolder()
    assert folder.path.parent == Path("/tmp")
    folder.close()
    shutil.rmtree(folder.path)


def test_a_ray_without_tokens_is_refused():
    check_version("2.52.0")
    check_version("3.0.0.dev0")
    with pytest.raises(UserError, match=r"Ray 2.51.1 has no token authentication.*>=2.52"):
        check_version("2.51.1")


def _read(path: str) -> str:
    return Path(path).read_text()


def _is_alive(pid: int) -> bool:
    return identify("", pid).running()
