"""The seccomp filter of the sandbox: a list of allowed system calls, assembled as classic BPF.

The filter checks the architecture first, so that the same number of another ABI (`int 0x80`, x32) is
not mistaken for an allowed call: such a process is killed.
"""

from __future__ import annotations

import errno
import functools
import os
import struct

from slime.core.errors import UserError

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH
_X32_BIT = 0x40000000
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000  # SECCOMP_RET_*
_LOAD, _JEQ, _JGT, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data
_CLONE_NEW = 0x7E020000  # every CLONE_NEW* flag
_CLONE_THREAD = 0x00010000
_TERMINAL_IOCTLS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6

Line = tuple[int, int, int, int]

NEWEST = 452  # calls with higher numbers are answered with ENOSYS, so that programs fall back
# fmt: off
# The allowed calls with their numbers on x86_64 and aarch64, from the kernel's unistd_64.h and the generic
# table that aarch64 uses. Calls that are missing are refused: the mount family, ptrace, bpf, io_uring,
# keyrings, namespaces, System V IPC, memfd_create (memory that no process has mapped could not be
# counted), and so on.
SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "ioctl": (16, 29),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124),
    "mremap": (25, 216), "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233),
    "dup": (32, 23), "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172),
    "sendfile": (40, 71), "socket": (41, 198), "connect": (42, 203), "accept": (43, 202),
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "shutdown": (48, 210), "bind": (49, 200), "listen": (50, 201), "getsockname": (51, 204),
    "getpeername": (52, 205), "socketpair": (53, 199), "setsockopt": (54, 208),
    "getsockopt": (55, 209), "clone": (56, 220), "fork": (57, None), "vfork": (58, None),
    "execve": (59, 221), "exit": (60, 93), "wait4": (61, 260), "kill": (62, 129),
    "uname": (63, 160), "fcntl": (72, 25), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "truncate": (76, 45), "ftruncate": (77, 46), "getdents": (78, None),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None),
    "mkdir": (83, None), "rmdir": (84, None), "creat": (85, None), "link": (86, None),
    "unlink": (87, None), "symlink": (88, None), "readlink": (89, None), "chmod": (90, None),
    "fchmod": (91, 52), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "setuid": (105, 146), "setgid": (106, 144), "geteuid": (107, 175), "getegid": (108, 177),
    "setpgid": (109, 154), "getppid": (110, 173), "getpgrp": (111, None), "setsid": (112, 157),
    "setreuid": (113, 145), "setregid": (114, 143), "getgroups": (115, 158),
    "setgroups": (116, 159), "setresuid": (117, 147), "getresuid": (118, 148),
    "setresgid": (119, 149), "getresgid": (120, 150), "getpgid": (121, 155),
    "setfsuid": (122, 151), "setfsgid": (123, 152), "getsid": (124, 156), "capget": (125, 90),
    "capset": (126, 91), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigqueueinfo": (129, 138), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "utime": (132, None), "mknod": (133, None), "statfs": (137, 43), "fstatfs": (138, 44),
    "getpriority": (140, 141), "setpriority": (141, 140), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127),
    "mlock": (149, 228), "munlock": (150, 229), "prctl": (157, 167), "arch_prctl": (158, None),
    "setrlimit": (160, 164), "gettid": (186, 178), "readahead": (187, 213), "getxattr": (191, 8),
    "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "tkill": (200, 130), "time": (201, None),
    "futex": (202, 98), "sched_setaffinity": (203, 122), "sched_getaffinity": (204, 123),
    "epoll_create": (213, None), "getdents64": (217, 61), "set_tid_address": (218, 96),
    "restart_syscall": (219, 128), "fadvise64": (221, 223), "timer_create": (222, 107),
    "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_getoverrun": (225, 109),
    "timer_delete": (226, 111), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "tgkill": (234, 131), "utimes": (235, None),
    "get_mempolicy": (239, 236), "waitid": (247, 95), "openat": (257, 56),
    "mkdirat": (258, 34), "mknodat": (259, 33), "fchownat": (260, 54), "futimesat": (261, None),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37),
    "symlinkat": (266, 36), "readlinkat": (267, 78), "fchmodat": (268, 53),
    "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "sync_file_range": (277, 84),
    "utimensat": (280, 88), "epoll_pwait": (281, 22), "signalfd": (282, None),
    "timerfd_create": (283, 85), "eventfd": (284, None), "fallocate": (285, 47),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "accept4": (288, 242),
    "signalfd4": (289, 74), "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24),
    "pipe2": (293, 59), "preadv": (295, 69), "pwritev": (296, 70),
    "recvmmsg": (299, 243), "prlimit64": (302, 261), "sendmmsg": (307, 269), "getcpu": (309, 168),
    "sched_getattr": (315, 275), "renameat2": (316, 276), "getrandom": (318, 278),
    "execveat": (322, 281), "membarrier": (324, 283), "mlock2": (325, 284),
    "copy_file_range": (326, 285), "preadv2": (327, 286), "pwritev2": (328, 287),
    "statx": (332, 291), "rseq": (334, 293), "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434), "close_range": (436, 436), "openat2": (437, 437),
    "faccessat2": (439, 439), "epoll_pwait2": (441, 441), "futex_waitv": (449, 449),
    "fchmodat2": (452, 452),
}
# fmt: on

FORKS = frozenset({"fork", "vfork"})
SOCKETS = frozenset({"socket", "connect", "bind", "listen", "accept", "accept4"})

# Refused with an error that libraries know how to handle; everything else with EPERM.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435),  # its flags lie behind a pointer; the C library falls back to clone
    "inotify_init": (253, None),  # the few that a user may have are counted for the whole machine
    "inotify_init1": (294, 26),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
}


@functools.cache
def build_filter(*, forks: bool, network: bool, machine: str = os.uname().machine) -> bytes:
    """Return the BPF program for this kind of sandbox.

    forks: processes may be started; otherwise threads only. network: sockets may be made.
    """
    if machine not in _MACHINES:
        raise UserError(
            "programs of the model can be sandboxed on x86_64 and aarch64 only: there is no "
            f"system-call filter for {machine}"
        )
    column, arch = _MACHINES[machine]
    program: list[Line] = [(_LOAD, 0, 0, _ARCH), (_JEQ, 1, 0, arch), _return(_KILL)]
    program += [(_LOAD, 0, 0, _NUMBER), (_JGE, 0, 1, _X32_BIT), _return(_KILL)]
    for name, numbers in SYSCALLS.items():
        number = numbers[column]
        if number is None or (name in FORKS and not forks) or (name in SOCKETS and not network):
            continue
        rule = _rule(name, forks, network)
        program += [(_JEQ, 0, len(rule), number), *rule]
    for name, numbers in REFUSED.items():
        code = errno.EOPNOTSUPP if name.endswith("xattr") else errno.ENOSYS
        if (number := numbers[column]) is not None:
            program += [(_JEQ, 0, 1, number), _refuse(code)]
    program += [(_JGT, 0, 1, NEWEST), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def _rule(name: str, forks: bool, network: bool) -> list[Line]:
    """Return the lines behind the comparison of the call's number; each path ends in a return."""
    if name == "clone":
        thread_only = [] if forks else [(_JSET, 1, 0, _CLONE_THREAD), _refuse(errno.EPERM)]
        return [
            (_LOAD, 0, 0, _argument(0)), (_JSET, 0, 1, _CLONE_NEW), _refuse(errno.EPERM),
            *thread_only, _return(_ALLOW),
        ]  # fmt: skip
    if name == "ioctl":
        checks = [line for number in _TERMINAL_IOCTLS for line in _refuse_if(number, errno.EPERM)]
        return [(_LOAD, 0, 0, _argument(1)), *checks, _return(_ALLOW)]
    if name == "prlimit64":  # the agent of an episode has the same user id as its programs
        return [(_LOAD, 0, 0, _argument(0)), *_refuse_if(1, errno.EPERM), _return(_ALLOW)]
    if name == "socket":
        jumps = [(_JEQ, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
        return [
            (_LOAD, 0, 0, _argument(0)), *jumps, _refuse(errno.EAFNOSUPPORT), _return(_ALLOW)
        ]  # fmt: skip
    if name == "sendto" and not network:  # an address would reach a socket other than the pair's
        return [
            (_LOAD, 0, 0, _argument(4)), (_JEQ, 1, 0, 0), _refuse(errno.EPERM),
            (_LOAD, 0, 0, _argument(4) + 4), (_JEQ, 1, 0, 0), _refuse(errno.EPERM),
            _return(_ALLOW),
        ]  # fmt: skip
    return [_return(_ALLOW)]


def _refuse_if(value: int, code: int) -> list[Line]:
    return [(_JEQ, 0, 1, value), _refuse(code)]


def _argument(index: int) -> int:
    """Return the offset of the low half of an argument (both machines are little-endian)."""
    return 16 + 8 * index


def _return(action: int) -> Line:
    return (_RETURN, 0, 0, action)


def _refuse(code: int) -> Line:
    return _return(_ERRNO | code)
