"""SIGTERM and Ctrl-C end a run with a checkpoint instead of losing work."""

from __future__ import annotations

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
    """

    def __init__(self, notify: Callable[[str], None]):
        self.received: int | None = None
        self._notify = notify
        self._interruptible = False
        self._old: dict[int, Any] = {}

    def install(self) -> None:
        """After connecting to Ray, which installs a handler of its own that ends the process."""
        self._old = {n: signal.signal(n, self._on_signal) for n in (signal.SIGTERM, signal.SIGINT)}

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

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received:
            return
        self.received = number
        self._notify(f"{signal.Signals(number).name}: saving, then stopping")
        if self._interruptible:
            # Inside its calls Ray looks for this exception alone: any other ends them in a SystemError.
            raise KeyboardInterrupt
