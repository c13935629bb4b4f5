"""Log files of a run's processes: records, library output, crash stacks; a short form on the console."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from slime.config.env import library_env
from slime.config.flags.registry import redact
from slime.utils.printable import safe_text

logger = logging.getLogger(__name__)

# Libraries that report every request or file lock; their warnings are still logged.
_NOISY = (
    "aiohttp.access",
    "asyncio",
    "filelock",
    "fsspec",
    "git",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",  # of openai's client
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

    Both get slime's INFO records and the warnings of all libraries; the file with time and location,
    the console in one short line. A second call replaces the handlers of the first.
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
    """Ignore OSError: a full disk loses log lines, and the run itself reports failed writes."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _ConsoleHandler(logging.StreamHandler):
    """Write to the current sys.stderr, which a live display replaces while it is on screen."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


class _ConsoleFormatter(logging.Formatter):
    """Print the bare message for INFO of the driver, else with level and role.

    Tracebacks below ERROR appear only in the file.
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


def open_process_log(run_dir: str, role: str, variables: Iterable[str] = ()) -> None:
    """Send all output of this process to <run_dir>/logs/<role>.log.

    File descriptors 1 and 2 are redirected too, since NCCL, CUDA and faulthandler bypass Python. The
    first line names host, pid and the environment variables of libraries; `variables` are shown
    in addition.
    """
    setup_logging(run_dir, role=role, console=False)
    _redirect(Path(run_dir) / "logs" / f"{role}.log")
    faulthandler.enable()
    shown = redact("env", library_env(variables))
    values = " ".join(f"{name}={value}" for name, value in sorted(shown.items()))
    logger.info("%s on %s, pid %d: %s", role, socket.gethostname(), os.getpid(), values)


def _redirect(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Line-buffered, so that output before a crash is not lost.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
