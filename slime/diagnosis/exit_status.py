"""How a command ends: an error becomes a message and an exit status, a signal a stop with a checkpoint."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from slime.core.errors import UserError
from slime.utils.printable import safe_text

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def run_command(work: Callable[[], int]) -> int:
    """Return the status of `work`, or print its error and return an exit status.

    A UserError and a full disk are printed as one paragraph, all other errors as a traceback; the text
    of `add_advice` comes last.
    """
    try:
        return work()
    except KeyboardInterrupt:
        say("slime: interrupted")
        return 130
    except UserError as error:
        # Ray wraps an error raised in an actor; the text of its wrapper is a traceback.
        say(_with_advice(f"slime: {getattr(error, 'cause', error)}", error))
        return error.exit_status
    except Exception as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, OSError) and cause.errno in _CANNOT_WRITE:
            text = f"slime: {cause.filename or 'a file'} cannot be written: {cause.strerror}"
        else:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        say(_with_advice(text.rstrip(), error))
        return 1


def add_advice(error: BaseException, advice: str) -> None:
    """Make `run_command` print this after the error."""
    notes = getattr(error, "__notes__", [])
    vars(error)["__notes__"] = [*notes, advice]  # what add_note() of Python 3.11 does


def say(text: str) -> None:
    """Print to stderr, which may be a terminal that was closed."""
    with suppress(OSError):
        print(safe_text(text), file=sys.stderr, flush=True)


def _with_advice(text: str, error: BaseException) -> str:
    notes = [note for note in getattr(error, "__notes__", []) if note not in text]
    return "\n".join([text, *notes])


class Terminated(Exception):
    """A signal requested a stop during work that may be aborted."""


class StopSignal:
    """Records SIGTERM, SIGHUP or Ctrl-C; raises Terminated only inside `interruptible()`.

    Generation and evaluation are aborted immediately, because the checkpoint holds the state before them.
    A training step is finished first: the loop reads `received` after it. A second Ctrl-C does not wait.
    `then` tells the user what happens next.
    """

    def __init__(self, notify: Callable[[str], None], then: str = "saving, then stopping"):
        self.received: int | None = None
        self._notify, self._then = notify, then
        self._interruptible = False
        self._failure: str | None = None
        self._abort_work = False
        self._old: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers; call it after connecting to Ray, whose own handler exits the process."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as set by nohup
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

        `at_once` also aborts a training step, whose processes are lost.
        """
        self._failure, self._abort_work = reason, at_once
        os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._abort_work or (self.received and number == signal.SIGINT):
            raise KeyboardInterrupt
        if self.received:
            return
        self.received = number
        why = self._failure or signal.Signals(number).name
        self._notify(f"{why}: {self._then}")
        if self._interruptible:
            # Ray handles only this exception inside its calls: any other becomes a SystemError.
            raise KeyboardInterrupt
