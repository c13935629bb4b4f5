"""The whole suite in several processes: which tests stay together, and in which order they start.

`make test` asks for it (pytest-xdist, `-n`); a plain `pytest tests/unit/test_x.py` does not need this.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests with whole runs in them come first; what is short fills the end.
FIRST = (
    "tests/e2e/",
    "tests/compat/",
    "tests/launch/",
    "tests/parity/",
    "tests/conformance/",
    "tests/integration/",
)
# One server for all tests of a folder: every process would start its own.
TOGETHER = ("tests/conformance/",)
# A whole run to a test, and little that they share.
APART = "tests/compat/test_starts.py"


def worker_number() -> int:
    """Return which of the processes this is; 0 if it is the only one."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def avoid_amx() -> None:
    """Before torch is imported: virtual machines exist whose CPU lists AMX and traps its instructions, which
    oneDNN uses for bf16 (signal 4). Processes that tests start inherit this."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def limit_threads() -> None:
    """Before torch is imported: threads of several processes that wait for each other take the cores
    from those they wait for."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def unit_of_work(nodeid: str) -> str:
    """Return the name that all tests share which one process has to run: their file, in most cases."""
    if nodeid.startswith(APART):
        return nodeid
    folders = (folder for folder in TOGETHER if nodeid.startswith(folder))
    return next(folders, nodeid.split("::", 1)[0])


def sort_items(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        starts = (n for n, prefix in enumerate(FIRST) if item.nodeid.startswith(prefix))
        return next(starts, len(FIRST))

    items.sort(key=place)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled, in whichever process asked first; nobody may change it."""
    folder = factory.getbasetemp() / name
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = factory.getbasetemp().parent / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            make(folder)
            (folder / "made").touch()
    return folder


def make_scheduler(config: pytest.Config, log: object):
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of_work(nodeid)

    config.option.loadscopereorder = False
    return Scheduler(config, log)
