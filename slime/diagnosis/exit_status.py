"""The outermost boundary of a command: an error becomes a message and an exit status."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from slime.core.errors import UserError
from slime.utils.printable import safe_text

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def run_command(work: Callable[[], int]) -> int:
    """Return the status of `work`, or print its error and return an exit status.

    A user's mistake and a full disk are one paragraph, anything else is a traceback; the text of
    `add_advice` comes last.
    """
    try:
        return work()
    except KeyboardInterrupt:
        say("slime: interrupted")
        return 130
    except UserError as error:
        # One raised in an actor arrives inside Ray's wrapper, whose text is a traceback.
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
    """Have `run_command` print this after the error."""
    notes = getattr(error, "__notes__", [])
    vars(error)["__notes__"] = [*notes, advice]  # what add_note() of Python 3.11 does


def say(text: str) -> None:
    """Print to stderr, which may be a terminal that was closed."""
    with suppress(OSError):
        print(safe_text(text), file=sys.stderr, flush=True)


def _with_advice(text: str, error: BaseException) -> str:
    notes = [note for note in getattr(error, "__notes__", []) if note not in text]
    return "\n".join([text, *notes])
