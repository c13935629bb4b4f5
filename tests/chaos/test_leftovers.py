"""What a start leaves behind is found and ended, and nothing of anybody else's is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from multiprocessing.shared_memory import SharedMemory

import psutil
import pytest

from tests.chaos.leftovers import find_leftovers, listen_ports, partial_files, shared_memory
from tests.chaos.modes import Folders
from tests.chaos.processes import MARKER, Processes

SLEEP = "import time; time.sleep(600)"
LISTEN = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print('up', flush=True); time.sleep(600)"
# A child without the marker in its environment, as of a process that clears it.
PARENT = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}}); print(p.pid, flush=True); p.wait()"


@pytest.fixture
def folders(tmp_path):
    found = Folders(root=tmp_path)
    found.disk.mkdir()
    found.temporary.mkdir()
    return found


@pytest.fixture
def start():
    """Start a program with or without the marker; all are ended after the test."""
    begun: list[subprocess.Popen[str]] = []

    def start(code: str, marker: str | None) -> subprocess.Popen[str]:
        env = {**os.environ, **({MARKER: marker} if marker else {})}
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.wait()


def look(processes, folders, before=None, ports=frozenset()):
    return find_leftovers(
        processes,
        folders,
        shared_before=shared_memory() if before is None else before,
        ports=set(ports),
        grace_s=0.5,
    )


def test_nothing_left_is_nothing_found(folders):
    found = look(Processes(uuid.uuid4().hex), folders)
    assert not found and str(found) == ""


def test_a_process_that_stays_is_named_and_ended_and_a_stranger_lives_on(start, folders):
    marker = uuid.uuid4().hex
    mine, other, unmarked = start(SLEEP, marker), start(SLEEP, uuid.uuid4().hex), start(SLEEP, None)
    found = look(Processes(marker), folders)
    assert len(found.processes) == 1 and found.processes[0].startswith(f"{mine.pid} ")
    assert found.lingered_s >= 0.5
    assert mine.wait(timeout=10) == -9
    assert other.poll() is None and unmarked.poll() is None


def test_a_child_that_lost_the_marker_is_found_after_its_parent_died(start, folders):
    marker = uuid.uuid4().hex
    parent, processes = start(PARENT, marker), Processes(marker)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    processes.look()
    parent.kill()
    parent.wait()
    found = look(processes, folders)
    assert [line.split()[0] for line in found.processes] == [str(child)]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_port_that_is_still_listened_on(start, folders):
    marker = uuid.uuid4().hex
    process, processes = start(LISTEN, marker), Processes(marker)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    ports = listen_ports(processes)
    assert len(ports) == 1
    assert look(processes, folders, ports=ports).ports == sorted(ports)


def test_a_segment_of_shared_memory(start, folders):
    marker = uuid.uuid4().hex
    processes, before = Processes(marker), shared_memory()
    process = start(SLEEP, marker)
    processes.look()
    segment = SharedMemory(name=f"slime-test-{process.pid}-0", create=True, size=64)
    try:
        assert look(processes, folders, before).shared_memory == [segment.name.lstrip("/")]
    finally:
        segment.close()
        segment.unlink()


def test_a_segment_that_another_process_uses_is_not_ours(folders):
    before = shared_memory()
    segment = SharedMemory(create=True, size=64)
    try:
        assert not look(Processes(uuid.uuid4().hex), folders, before)
    finally:
        segment.close()
        segment.unlink()


def test_temporary_folders_but_not_rays(folders):
    (folders.temporary / "pymp-abc").mkdir()
    (folders.temporary / "ray").mkdir()
    assert look(Processes(uuid.uuid4().hex), folders).temporary == ["pymp-abc"]


def test_half_written_files(folders):
    (folders.checkpoints / "iter_0000003.tmp").mkdir(parents=True)
    (folders.checkpoints / "iter_0000002").mkdir()
    assert partial_files(folders) == ["checkpoints/iter_0000003.tmp"]
