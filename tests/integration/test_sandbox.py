"""What a model's program must not be able to do or see, tried as root and as another user."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import socket
import tempfile
from pathlib import Path

import pytest

from slime.rollout.sandbox.bubblewrap import interpreter_paths
from tests.sandboxes import USERS, attack

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86_64")

# Calls that change namespaces or mounts, inspect other processes, or hold memory that nobody counts.
FORBIDDEN = {
    "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "memfd_create": (319, 279), "open_by_handle_at": (304, 265), "kexec_load": (246, 104),
    "init_module": (175, 105), "reboot": (169, 142), "syslog": (103, 116), "quotactl": (179, 60),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "mq_open": (240, 180),
    "io_setup": (206, 0), "vmsplice": (278, 75), "personality": (135, 92), "clone3": (435, 435),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "io_uring_setup": (425, 425), "mount_setattr": (442, 442),
    "pidfd_getfd": (438, 438), "memfd_secret": (447, 447), "landlock_create_ruleset": (444, 444),
    "a call of the future": (600, 600),
}  # fmt: skip


@USERS
def test_read_only_flags_cannot_be_cleared(user):
    """The call that made / of the host writable, and writing to everything that is visible."""
    done = attack(
        user,
        """
        import ctypes, os, sys
        libc = ctypes.CDLL(None, use_errno=True)
        attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)  # clear MOUNT_ATTR_RDONLY
        for path in (b"/", b"/usr", b"/proc"):
            print(libc.syscall(442, -100, path, 0, ctypes.byref(attributes), 32), end=" ")
        for folder in ("/", "/usr", "/usr/bin", "/etc", "/proc", "/dev", sys.prefix, sys.base_prefix):
            try:
                open(folder + "/written", "w")
                print("WRITTEN", folder)
            except OSError:
                pass
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/self/oom_adj"):
            try:
                os.open(path, os.O_WRONLY)
                print("OPENED", path)
            except OSError:
                pass
        """,
    )
    assert (done.stdout, done.stderr) == ("-1 -1 -1 ", "")


@USERS
def test_forbidden_system_calls_are_refused(user):
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    numbers = {name: pair[column] for name, pair in FORBIDDEN.items()}
    done = attack(
        user,
        f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for name, number in {numbers!r}.items():
            ctypes.set_errno(0)
            result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
            if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
                print(name, result, ctypes.get_errno())
        """,
    )
    assert (done.stdout, done.stderr) == ("", "")


@USERS
def test_no_user_namespace_and_no_process_by_clone(user):
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    done = attack(
        user,
        f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for flags in (0x10000000 | 17, 0x10000000 | 0x10000 | 0x800 | 0x100, 17):
            result = libc.syscall({number}, flags, 0, 0, 0, 0)
            if result == 0:
                os._exit(0)
            print(result, end=" ")
        try:
            os.fork()
        except PermissionError:
            print("no fork")
        """,
    )
    assert done.stdout == "-1 -1 -1 no fork\n"


@X86
@USERS
@pytest.mark.parametrize(
    "code",
    [
        "b8 02 00 00 00 cd 80 c3",  # mov eax, 2 (fork of i386); int 0x80; ret
        "b8 39 00 00 40 0f 05 c3",  # mov eax, 0x40000039 (fork of x32); syscall; ret
    ],
)
def test_system_calls_of_another_architecture_kill(user, code):
    done = attack(
        user,
        f"""
        import ctypes, mmap
        memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        memory.write(bytes.fromhex("{code}"))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        print("before", flush=True)
        print("returned", ctypes.CFUNCTYPE(ctypes.c_int)(address)(), flush=True)
        """,
    )
    assert done.stdout == "before\n"
    assert done.exit_status == 128 + 31  # SIGSYS


@USERS
def test_programs_have_no_privileges(user):
    done = attack(
        user,
        """
        import os
        fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print({name: value.split() for name, value in fields.items()
               if name in ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp") or name[:3] == "Cap"})
        print(os.getsid(0) == os.getpid(), sorted(os.listdir("/proc/self/fd")))
        """,
    )
    nobody, none = ["65534"] * 4, ["0" * 16]
    expected = {"Uid": nobody, "Gid": nobody, "Groups": []}
    expected |= dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), none)
    expected |= {"NoNewPrivs": ["1"], "Seccomp": ["2"]}
    first, second = done.stdout.splitlines()
    assert first == str(expected)
    assert second == "True ['0', '1', '2', '3']"  # 3 is the folder being listed


@USERS
def test_programs_see_nothing_of_the_run(user):
    """Neither files of the user and of root, nor shared memory, nor other processes, nor variables."""
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        paths = [
            stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, mode="w"))
            for folder in ("/tmp", "/dev/shm", Path.cwd(), Path.home())
        ]
        for file in paths:
            file.write(secret)
            file.flush()
            os.chmod(file.name, 0o644)
        names = [file.name for file in paths]
        names += ["/etc/shadow", "/etc/hostname", "/root/.ray/auth_token", "/var/run/docker.sock"]
        done = attack(
            user,
            f"""
            import os
            print([path for path in {names!r} if os.path.lexists(path)])
            print(sorted(name for name in os.listdir("/proc") if name.isdigit()), os.getpid())
            print(sorted(os.environ))
            print(os.listdir("."), sorted(os.listdir("/tmp")), os.listdir("/dev/shm"))
            """,
        )
    *others, last = done.stdout.splitlines()
    assert others == [
        "[]",
        "['1'] 1",
        "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PWD', 'TMPDIR']",
    ]
    parents = {Path(path).parts[2] for path in interpreter_paths() if path.startswith("/tmp/")}
    assert last in [f"[] {sorted({'.shm', 'work', *more})} []" for more in ((), parents)]


@USERS
def test_devices_are_few_and_cannot_be_changed(user):
    before = os.stat("/dev/null").st_mode
    done = attack(
        user,
        """
        import os
        print(sorted(os.listdir("/dev")))
        for path in ("/dev/null", "/usr/bin"):
            try:
                os.chmod(path, 0)
                print("CHANGED", path)
            except OSError as error:
                pass
        open("/dev/null", "w").write("x")
        print(len(open("/dev/urandom", "rb").read(8)))
        """,
    )
    devices = [
        "fd",
        "full",
        "null",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "urandom",
        "zero",
    ]
    assert done.stdout == f"{devices}\n8\n", done.stderr
    assert os.stat("/dev/null").st_mode == before


@USERS
def test_no_socket_leads_outside(user):
    """TCP, UNIX sockets by path, and datagrams sent from one end of a pair to a path."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server,
    ):
        path = f"{folder}/server"
        server.bind(path)
        os.chmod(folder, 0o755)
        os.chmod(path, 0o666)
        done = attack(
            user,
            f"""
            import socket
            for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
                try:
                    socket.socket(family)
                    print("SOCKET", family)
                except PermissionError:
                    pass
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            for send in (lambda: ours.sendto(b"x", {path!r}), lambda: ours.connect({path!r}),
                         lambda: ours.sendmsg([b"x"], [], 0, {path!r}),
                         lambda: ours.bind("/tmp/own")):
                try:
                    send()
                    print("SENT")
                except OSError:
                    pass
            ours.send(b"pair")
            print(theirs.recv(10))
            """,
        )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.recv(10)
    assert done.stdout == "b'pair'\n", done.stderr


@USERS
def test_programs_can_use_the_interpreter(user):
    """Threads, event loops, temporary files and packages work as usual."""
    done = attack(
        user,
        """
        import asyncio, multiprocessing, sqlite3, ssl, tempfile, threading, decimal, ctypes, zlib
        async def wait():
            await asyncio.sleep(0.01)
            return await asyncio.to_thread(lambda: 7)
        print(asyncio.run(wait()))
        with tempfile.NamedTemporaryFile() as file, open("x", "w") as other:
            file.write(b"x"), other.write("y")
        thread = threading.Thread(target=lambda: print(multiprocessing.Lock() is not None))
        thread.start(); thread.join()
        """,
    )
    assert (done.stdout, done.stderr) == ("7\nTrue\n", "")
