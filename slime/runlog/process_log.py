"""The log file of one process of a run: log records, library output, and crash stacks."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from slime.config.env import library_env
from slime.config.flags.registry import redact
from slime.runlog.logging import setup_logging

logger = logging.getLogger(__name__)


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
