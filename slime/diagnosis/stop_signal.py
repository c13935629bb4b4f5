"""SIGTERM, SIGHUP and Ctrl-C end a run with a checkpoint instead of losing work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(Exception):
    """A signal requested a stop during work that may be dropped."""


class StopSignal:
    """Records the signal; raises Terminated only inside `interruptible()`.

    Generation and evaluation are dropped at once, because the checkpoint holds the state before them. A
    training step is finished first: the loop reads `received` after it. A second Ctrl-C does not wait.
    `then` tells the user what happens next.
    """

    def __init__(self, notify: Callable[[str], None], then: str = "saving, then stopping"):
        self.received: int | None = None
        self._notify, self._then = notify, then
        self._interruptible = False
        self._failure: str | None = None
        self._drop_work = False
        self._old: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers; call it after connecting to Ray, whose own handler exits the process."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        self._old = {n: signal.signal(n, self._on_signal) for n in numbers}

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        try:
            self._interruptible = True
            if self.received:  # checked second, so that a signal in between is not missed
                raise Terminated
            yield
        except KeyboardInterrupt:
            raise Terminated from None
        finally:
            self._interruptible = False

    def fail(self, reason: str, *, at_once: bool) -> None:
        """Stop the run as a signal would, because of `reason`; callable from any thread.

        `at_once` also drops a training step, whose processes are lost.
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
            # Ray handles only this exception inside its calls: any other becomes a SystemError.
            raise KeyboardInterrupt
