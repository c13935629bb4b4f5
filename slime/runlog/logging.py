"""Logging of the driver and of the actors: everything to a file, the essential to the console."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from slime.utils.printable import safe_text

# Libraries that report every request or file lock; their warnings still come through.
_NOISY = (
    "aiohttp.access",
    "asyncio",
    "filelock",
    "fsspec",
    "git",
    "httpcore",
    "httpx",
    "matplotlib",
    "numba",
    "PIL",
    "ray",
    "torch.distributed",
    "transformers",
    "urllib3",
    "wandb",
)


def setup_logging(
    run_dir: str | Path | None = None, *, role: str = "driver", console: bool = True
) -> None:
    """Send records of this process to <run_dir>/logs/<role>.log and, shortened, to the console.

    The file takes information of slime's and warnings of everyone's, with time and place; the console
    the same in one short line. Calling it again replaces what an earlier call set up.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if getattr(h, "slime_handler", False)]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = []
    if run_dir is not None:
        folder = Path(run_dir) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        handlers.append(_LogFile(folder / f"{role}.log", encoding="utf-8"))
        handlers[-1].setFormatter(_FileFormatter(_FILE_FORMAT))
    if console:
        handlers.append(_ConsoleHandler())
        handlers[-1].setFormatter(_ConsoleFormatter(role))
    for handler in handlers:
        handler.slime_handler = True  # type: ignore[attr-defined]
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


_FILE_FORMAT = "%(asctime)s %(levelname)-7s %(process)d %(name)s:%(lineno)d  %(message)s"


class _FileFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return safe_text(super().format(record))


class _LogFile(logging.FileHandler):
    """A disk that is full loses lines of the log; the run itself says what it could not write."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _ConsoleHandler(logging.StreamHandler):
    """Writes to whatever sys.stderr is at the moment: a live display swaps it while it is on screen."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


class _ConsoleFormatter(logging.Formatter):
    """The message alone for information of the driver's; level and role in front of the rest.

    The traceback of something less than an error is left to the file.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._prefix = "" if role == "driver" else f"[{role}] "

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.ERROR:
            text = f"{record.levelname.lower()}: {super().format(record)}"
        else:
            level = "warning: " if record.levelno >= logging.WARNING else ""
            text = level + record.getMessage()
        return self._prefix + safe_text(text)
