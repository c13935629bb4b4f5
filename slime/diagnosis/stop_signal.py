"""SIGTERM, SIGHUP and Ctrl-C end a run with a checkpoint instead of losing work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(Exception):
    """A signal asked for an end while the work in hand could be dropped."""


class StopSignal:
    """Remembers the signal; raises Terminated only inside `interruptible()`.

    Generation and evaluation are dropped at once, for the checkpoint holds the state before them. A
    training step is finished first: the loop reads `received` after it. A second Ctrl-C does not wait.
    `then` is what the user is told that happens next.
    """

    def __init__(self, notify: Callable[[str], None], then: str = "saving, then stopping"):
        self.received: int | None = None
        self._notify, self._then = notify, then
        self._interruptible = False
        self._failure: str | None = None
        self._drop_work = False
        self._old: dict[int, Any] = {}

    def install(self) -> None:
        """After connecting to Ray, which installs a handler of its own that ends the process."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        self._old = {n: signal.signal(n, self._on_signal) for n in numbers}

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        try:
            self._interruptible = True
            if self.received:  # looked at second: one that comes in between is not missed
                raise Terminated
            yield
        except KeyboardInterrupt:
            raise Terminated from None
        finally:
            self._interruptible = False

    def fail(self, reason: str, *, at_once: bool) -> None:
        """From any thread: end the run as a signal would, because of `reason`.

        `at_once` also drops a training step: what it waits for will not come.
        """
        self._failure, self._drop_work = reason, at_once
        os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._drop_work or (self.received and number == signal.SIGINT):
            raise KeyboardInterrupt
        if self.received:
            return
        self.received = number
        why = self._failure or signal.Signals(number).name
        self._notify(f"{why}: {self._then}")
        if self._interruptible:
            # Inside its calls Ray looks for this exception alone: any other ends them in a SystemError.
            raise KeyboardInterrupt
