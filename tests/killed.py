"""A function run in a process that is killed before its nth change of the file system, for every n."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"}


def killed_at_each_change(function: Callable[..., Any], *args: Any) -> Iterator[int]:
    """Yield after each process that was killed; return once one came to its end.

    The interpreter announces renames, removals, new folders and files opened for writing before it does
    them. The caller puts the files back before it goes on.
    """
    context = multiprocessing.get_context("fork")
    for number in count():
        process = context.Process(target=_run, args=(number, function, args))
        process.start()
        process.join()
        if process.exitcode == 0:
            return
        assert process.exitcode == -signal.SIGKILL, process.exitcode
        yield number


def _run(number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    left = number

    def watch(event: str, values: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(values[2], int) and values[2] & os.O_ACCMODE
        if event in _CHANGES or writes:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(watch)
    function(*args)
    os._exit(0)
