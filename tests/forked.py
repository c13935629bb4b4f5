"""Processes that begin with torch and transformers imported: forked from one that imported them once.

A new Python process takes about four seconds of a core for what all trainers and engines import, longer
than most tests take for the rest. The process they are forked from starts when first needed, one per
process of pytest.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch.multiprocessing

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


def start_forked(function: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """Call a top-level function in a process of its own, with the environment of this one."""
    process = _CONTEXT.Process(target=_run, args=(dict(os.environ), function, args))
    process.start()
    return process


def run_forked(function: Callable[..., Any], count: int, *args: Any) -> None:
    """Call `function(number, *args)` in `count` processes; raise if it failed in one of them."""
    torch.multiprocessing.start_processes(
        _run_numbered, (dict(os.environ), function, args), nprocs=count, start_method="forkserver"
    )


def _run(variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    function(*args)


def _run_numbered(
    number: int, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    _run(variables, function, (number, *args))
