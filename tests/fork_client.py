"""A `python` that asks the server of tests/fork_server.py for a process, and is replaced by Python without it.

The process is not a child of this one, so this one stays: it passes signals on and ends the same way.
Standard library only, and as little of it as possible: it starts in hundredths of a second.
"""

import _socket as socket
import array
import marshal
import os
import signal
import sys

ADDRESS = "SLIME_TEST_FORK_SERVER"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(python: str) -> None:
    words = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        connection.connect(os.environ[ADDRESS])
        granted = _ask(connection, words)
    except (OSError, KeyError):
        granted = False
    if granted:
        for number in _PASSED_ON:
            signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if not granted:
        os.execv(python, [python, *words])
    _stay(connection)


def _ask(connection: socket.socket, words: list[str]) -> bool:
    """Send what a process inherits; return whether the server has started one."""
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    files.remove(connection.fileno())
    request = marshal.dumps((words, dict(os.environ), os.getcwd(), _umask(), files))
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    connection.sendmsg([len(request).to_bytes(4, "big")], [rights])
    connection.sendall(request)
    return connection.recv(1) == b"y"


def _stay(connection: socket.socket) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        # The other end of a pipe waits until all have closed it.
        if number != connection.fileno() and _is_open(number):
            os.close(number)
    reply = connection.recv(4)
    if len(reply) != 4:
        os._exit(1)  # the server is gone, and has killed the process
    status = int.from_bytes(reply, "big")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
