"""Run blocking calls concurrently, and wait for a condition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from slime.utils.sync_http import HttpError

Item = TypeVar("Item")
Result = TypeVar("Result")


def start_in_thread(call: Callable[[], Result]) -> Future[Result]:
    """Run `call` on a daemon thread, so that a call that never returns cannot keep the process alive."""
    future: Future[Result] = Future()
    threading.Thread(target=_run, args=(call, future), daemon=True, name="slime-call").start()
    return future


def run_all(items: Sequence[Item], call: Callable[[Item], Result]) -> list[Future[Result]]:
    """Call `call` for every item at the same time; return their futures once all have ended."""
    if len(items) == 1:  # a thread would cost more than many of these calls
        future: Future[Result] = Future()
        _run(partial(call, items[0]), future)
        return [future]
    futures = [start_in_thread(partial(call, item)) for item in items]
    wait(futures)
    return futures


def call_all(items: Sequence[Item], call: Callable[[Item], Result]) -> list[Result]:
    """Return what `call` returns for every item, called at the same time, once all calls have ended.

    Several HTTP failures are raised as one error with all messages; otherwise the first error is raised.
    """
    futures = run_all(items, call)
    errors = [error for future in futures if (error := future.exception()) is not None]
    if len(errors) > 1 and all(isinstance(error, HttpError) for error in errors):
        raise HttpError("; ".join(str(error) for error in errors)) from errors[0]
    return [future.result() for future in futures]


def wait_until(condition: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> bool:
    """Poll `condition` until it holds; return False if it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def _run(call: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised again by Future.result
        future.set_exception(error)
