"""The seccomp filter of the sandbox: an allow list, assembled as classic BPF.

The filter checks the architecture first, so that the same number of another ABI (`int 0x80`, x32) is
not mistaken for an allowed call: such a process is killed.
"""

from __future__ import annotations

import errno
import functools
import os
import struct

from slime.core.errors import UserError
from slime.rollout.sandbox.syscalls import FORKS, NEWEST, REFUSED, SOCKETS, SYSCALLS

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
