"""Processes that begin with torch and transformers imported: forked from one that imported them once.

A new Python process takes about four seconds of a core for what all trainers and engines import, longer
than most tests take for the rest. The process they are forked from starts when first needed, one per
process of pytest.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

_TIMEOUT_S = 300
_ROOT = Path(__file__).resolve().parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


def start_forked(function: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """Call a top-level function in a process of its own, with the environment of this one."""
    process = _CONTEXT.Process(target=_run, args=(dict(os.environ), function, args))
    process.start()
    return process


def start_python(
    words: list[str], stdout: Path, stderr: Path, **variables: str
) -> ForkServerProcess:
    """Run `python WORDS`, a script or `-m MODULE` with its options, with what it prints in files."""
    environment = {**os.environ, **variables}
    process = _CONTEXT.Process(target=_run, args=(environment, _python, (words, stdout, stderr)))
    process.start()
    return process


def run_python(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in the folder of the repository, as `subprocess.run` does, until it ends."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder) / "stdout", Path(folder) / "stderr"
        process = start_python(words, stdout, stderr, **variables)
        process.join(timeout=_TIMEOUT_S)
        process.kill()
        process.join()
        assert process.exitcode is not None
        printed = (path.read_text() if path.exists() else "" for path in (stdout, stderr))
        return subprocess.CompletedProcess(words, process.exitcode, *printed)


def run_forked(function: Callable[..., Any], count: int, *args: Any) -> None:
    """Call `function(number, *args)` in `count` processes; raise if it failed in one of them."""
    torch.multiprocessing.start_processes(
        _run_numbered, (dict(os.environ), function, args), nprocs=count, start_method="forkserver"
    )


def _run(variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    function(*args)


def _python(words: list[str], stdout: Path, stderr: Path) -> None:
    os.chdir(_ROOT)
    for number, path in ((1, stdout), (2, stderr)):
        with path.open("a") as file:
            os.dup2(file.fileno(), number)
    # OpenMP has read the variable already, in the process this one was forked from.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(f"{words[1]}.__main__", None)  # runpy would warn that it is imported
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _run_numbered(
    number: int, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    _run(variables, function, (number, *args))
