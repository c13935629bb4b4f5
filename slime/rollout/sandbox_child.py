"""Runs a program in a box of its own: `python sandbox_child.py '{"isolate": true, ...}'`.

The program is in the working folder, from where it goes into memory: an argument holds 128 KiB at most.

Started by file path, without slime on its way. Isolated means: namespaces of its own for network (no
interface at all), processes (all end with the first), and mounts (everything read-only but an empty
working folder). In either case a program may start threads but no processes, and has limits of CPU time,
memory, file size and open files.
"""

import sys

del sys.path[0]  # this folder; its modules are not top-level ones

import ctypes  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import struct  # noqa: E402

PROGRAM = "program.py"
NOT_ISOLATED = 97  # exit status: the system refused a namespace
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_PROCESS_CALLS = {"x86_64": (56, 435, (57, 58)), "aarch64": (220, 435, ())}  # clone, clone3, forks
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    settings = json.loads(sys.argv[1])
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    program = take_program(settings["folder"])
    if settings["isolate"]:
        try:
            isolate(settings["folder"])
        except OSError as error:
            print(error, file=sys.stderr)
            sys.exit(NOT_ISOLATED)
    limit(settings)
    forbid_processes()
    os.chdir(settings["folder"])
    os.execv(sys.executable, [sys.executable, "-I", f"/dev/fd/{program}"])


def take_program(folder: str) -> int:
    """The program as a file without a name, and nothing in the folder any more."""
    path = os.path.join(folder, PROGRAM)
    with open(path, "rb") as file:
        text = file.read()
    os.unlink(path)
    program = os.memfd_create(PROGRAM, 0)
    with open(program, "wb", closefd=False) as file:
        file.write(text)
    os.lseek(program, 0, os.SEEK_SET)
    return program


def isolate(folder: str) -> None:
    uid, gid = os.getuid(), os.getgid()
    _check(_libc.unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWIPC | _NEWNS), "unshare")
    for name, text in (
        ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"),
    ):  # fmt: skip
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _become_first_process()
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount /")
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    done = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE,
        ctypes.byref(attributes), ctypes.c_size_t(32),
    )  # fmt: skip
    _check(done, "read-only /")
    flags = _MS_NOSUID | _MS_NODEV
    mounted = _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, b"size=64m")
    _check(mounted, f"mount {folder}")


def _become_first_process() -> None:
    """Fork into the new process namespace; the outer process only passes on how it ended."""
    child = os.fork()
    if child == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    for name in (0, 1, 2):
        os.close(name)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def limit(settings: dict) -> None:
    cpu, memory = settings["cpu_s"], settings["memory_bytes"]
    limits = {
        resource.RLIMIT_CPU: cpu, resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 16 << 20, resource.RLIMIT_NOFILE: 64,
    }  # fmt: skip
    for which, value in limits.items():
        resource.setrlimit(which, (value, value))


def forbid_processes() -> None:
    """A system-call filter: fork and clone fail unless they make a thread.

    The limit on the number of processes would not do: it does not hold for root.
    """
    calls = _PROCESS_CALLS.get(os.uname().machine)
    if calls is None:
        return
    clone, clone3, forks = calls
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
    program = [(0x20, 0, 0, 0)]  # the call's number
    program += [(0x15, 0, 1, clone3), (0x06, 0, 0, unknown)]  # the C library then uses clone
    for call in forks:
        program += [(0x15, 0, 1, call), (0x06, 0, 0, refuse)]
    program += [(0x15, 1, 0, clone), (0x06, 0, 0, allow), (0x20, 0, 0, 16)]  # clone's flags
    program += [(0x45, 0, 1, 0x10000), (0x06, 0, 0, allow), (0x06, 0, 0, refuse)]  # CLONE_THREAD
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0), "call filter")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
