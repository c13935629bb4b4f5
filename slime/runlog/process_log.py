"""The log file of one process of a run: its own records, what libraries print, and its last words."""

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
    """Send everything this process says from now on to <run_dir>/logs/<role>.log.

    NCCL and CUDA write past Python, and a crash leaves a stack: file descriptors 1 and 2 lead to the
    file as well. It begins with where the process runs and what its environment says to libraries;
    `variables` are names to show beside the usual ones.
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
    # By the line: what was printed before a crash is not lost.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
