"""Limits hold for everything in a sandbox together, and nothing of it survives."""

from __future__ import annotations

import errno
import os
import secrets
import subprocess
import time
from pathlib import Path

import pytest

from tests.sandboxes import USERS, attack, call_as

# Runs given["program"] with the limits in given["limits"]; returns output, limit and seconds.
WORKER = """
began = time.monotonic()
limits = Limits(forks=True, **given["limits"])
process = await start([sys.executable, "-I", "-c", given["program"]], limits=limits)
output = await asyncio.wait_for(process.stdout.read(), 60)
await asyncio.wait_for(process.wait(), 60)
return output.decode(), process.limit, time.monotonic() - began
"""


def work(user, program, **limits):
    return call_as(user, WORKER, {"program": program, "limits": limits})


def is_running(mark):
    """Whether a process of this machine has the mark on its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes() and path.parent.name != str(os.getpid()):
                return True
        except OSError:
            continue
    return False


def wait_until_gone(mark):
    deadline = time.monotonic() + 20
    while is_running(mark):
        assert time.monotonic() < deadline, "a process of the sandbox survived"
        time.sleep(0.05)


@USERS
def test_a_fork_bomb_stays_small(user):
    """Every process forks until it is refused: the count is exact, whatever the user."""
    bomb = """
import os, time
started = os.open("count", os.O_CREAT | os.O_RDWR | os.O_APPEND)
end = time.monotonic() + 2
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            os.write(started, b"x")
    except BlockingIOError:
        time.sleep(0.01)
if os.getpid() == 1:
    print(os.fstat(started).st_size)
else:
    time.sleep(60)
"""
    output, limit, seconds = work(user, bomb, processes=24)
    assert (int(output), limit) == (23, "")
    assert seconds < 40


@USERS
@pytest.mark.parametrize(
    "hold",
    [
        "keep = b'x' * (200 << 20)",
        # Pages of a shared mapping that are in no page table still take memory.
        "import mmap; keep = mmap.mmap(-1, 200 << 20)\n"
        "for i in range(200): keep[i << 20 : (i + 1) << 20] = b'x' * (1 << 20)\n"
        "keep.madvise(mmap.MADV_DONTNEED)",
    ],
    ids=["private", "shared"],
)
def test_memory_of_children_adds_up(user, hold):
    """50 children of 200 MB are 10 GB; the limit is 600 MB, and each of them is below it."""
    program = f"""
import os, time
for _ in range(50):
    if os.fork() == 0:
        break
else:
    print("all started", flush=True)
    time.sleep(60)
time.sleep(os.getpid() * 0.02)
{hold}
time.sleep(60)
"""
    _, limit, seconds = work(user, program, memory_bytes=600 << 20)
    assert limit == "memory" and seconds < 30


@USERS
def test_children_that_share_their_memory_count_once(user):
    program = """
import os
keep = b"x" * (300 << 20)
children = [os.fork() for _ in range(1)]
for _ in range(9):
    if children[-1]:
        children.append(os.fork())
if not children[-1]:
    import time; time.sleep(1); os._exit(0)
for child in children:
    os.waitpid(child, 0)
print("done")
"""
    assert work(user, program, memory_bytes=600 << 20)[:2] == ["done\n", ""]


@USERS
def test_files_are_limited_and_count_as_memory(user):
    program = """
import errno, os
def fill(path):
    with open(path, "wb", 0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError as error:
            return errno.errorcode[error.errno]
print(fill("a"), fill("/tmp/b"), fill("/dev/shm/c"), os.statvfs(".").f_bavail)
"""
    output, limit, _ = work(user, program, disk_bytes=32 << 20)
    assert (output, limit) == ("EFBIG ENOSPC ENOSPC 0\n", "")
    output, limit, _ = work(user, program, disk_bytes=400 << 20, memory_bytes=200 << 20)
    assert (output, limit) == ("", "memory")


@USERS
def test_empty_files_are_limited(user):
    program = "n = 0\nwhile True:\n    open(f'file{n}', 'w').close()\n    n += 1"
    assert work(user, program, disk_bytes=8 << 20)[1] == "disk"


@USERS
def test_buffers_of_sockets_count_as_memory(user):
    program = """
import os, socket, time
for _ in range(20):
    if os.fork() == 0:
        pairs = [socket.socketpair() for _ in range(25)]
        time.sleep(60)
time.sleep(60)
"""
    assert work(user, program, memory_bytes=150 << 20)[1] == "memory"


@USERS
def test_cpu_time_of_children_adds_up(user):
    program = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    _, limit, seconds = work(user, program, cpu_s=3)
    assert limit == "cpu" and seconds < 30


@USERS
def test_no_system_v_memory_and_no_memory_files(user):
    done = attack(
        user,
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.shmget(0, 1 << 30, 0o1600))
        try:
            os.memfd_create("x")
        except OSError:
            print("refused")
        """,
    )
    assert done.stdout == "-1\nrefused\n"


@USERS
@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("while True: pass", "time"),
        ("import os, time; os.close(1); os.close(2); time.sleep(60)", "time"),
        ("import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n"
         "  except (OSError, ValueError): pass\nwhile True: signal.pause()", "time"),
        ("while True: print('x' * 10000)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 10000)", "output"),
    ],
    ids=["loop", "closed streams", "ignored signals", "output", "errors"],
)  # fmt: skip
def test_programs_end_whatever_they_do(user, program, limit):
    began = time.monotonic()
    time_limit_s = 1.5 if limit == "time" else 30.0
    done = attack(user, program, time_limit_s=time_limit_s, stdin="x" * (4 << 20))
    assert not done.ok and done.timed_out and time.monotonic() - began < 40
    assert len(done.stdout) <= 1 << 20 and len(done.stderr) <= 1 << 20


@USERS
def test_threads_are_limited(user):
    done = attack(
        user,
        """
        import threading, time
        threading.stack_size(64 << 10)
        for n in range(10000):
            try:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            except RuntimeError:
                break
        print(n)
        """,
    )
    assert int(done.stdout) == 63


@USERS
def test_no_inotify(user):
    """The kernel counts its instances for the user who runs slime, and allows 128 of them."""
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.inotify_init1(0), libc.inotify_init(), ctypes.get_errno())
"""
    assert attack(user, program).stdout == f"-1 -1 {errno.ENOSYS}\n"


@USERS
@pytest.mark.parametrize("isolate", [True, False])
def test_a_program_that_its_first_thread_has_left_is_killed(user, isolate):
    """It looks like one that has ended; its supervisor must neither wait for it nor leave it behind."""
    program = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
    done = attack(user, program, time_limit_s=1, isolate=isolate)
    assert (done.exit_status, done.limit) == (137, "time")


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{mark}"])
    os._exit(0)
print("started", flush=True)
{rest}
"""


@USERS
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("rest", ["time.sleep(600)", "pass"], ids=["killed", "ended"])
def test_daemons_do_not_survive(user, isolate, rest):
    """Neither the kill of a worker nor its end leaves a child behind that left its session."""
    mark = secrets.token_hex(8)
    body = """
    limits = Limits(forks=True)
    argv = [sys.executable, "-I", "-c", given["program"]]
    process = await start(argv, limits=limits, isolate=given["isolate"], cwd="/tmp")
    await process.stdout.readline()
    await asyncio.sleep(0.5)
    process.kill()
    await asyncio.wait_for(process.wait(), 30)
    """
    call_as(user, body, {"program": DAEMON.format(mark=mark, rest=rest), "isolate": isolate})
    wait_until_gone(mark)


HOPPER = """
import os, sys
if os.fork() == 0:
    os.setsid()
    for _ in range(1000):  # each process is gone before a list of processes is read
        if os.fork():
            os._exit(0)
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{mark}"])
"""


@USERS
def test_a_daemon_that_changes_its_process_id_does_not_survive(user):
    mark = secrets.token_hex(8)
    body = """
    argv = [sys.executable, "-I", "-c", given]
    process = await start(argv, limits=Limits(forks=True), isolate=False, cwd="/tmp")
    await asyncio.wait_for(process.wait(), 60)
    """
    call_as(user, body, HOPPER.format(mark=mark))
    assert not is_running(mark)
    time.sleep(1)  # it would be at its end by now
    assert not is_running(mark)


@USERS
@pytest.mark.parametrize("victim", ["os.getpid()", "process.pid"], ids=["slime", "supervisor"])
def test_a_killed_parent_takes_its_sandboxes_along(user, victim):
    mark = secrets.token_hex(8)
    body = f"""
    program = given + "\\nimport time; time.sleep(600)"
    argv = [sys.executable, "-I", "-c", program]
    process = await start(argv, limits=Limits(forks=True))
    await process.stdout.readline()
    os.kill({victim}, signal.SIGKILL)
    await asyncio.sleep(600)
    """
    program = DAEMON.format(mark=mark, rest="time.sleep(600)")
    with pytest.raises((AssertionError, subprocess.TimeoutExpired)):
        call_as(user, body, program, timeout=5)
    wait_until_gone(mark)
