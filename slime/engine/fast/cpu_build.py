"""Compiles cpu.c for this very processor, once, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_name("cpu.c")
# Sums may be reordered (that is what vectors do), but NaN and infinity keep their meaning. OpenMP is
# that of torch: a library of this name is already loaded, so both share one team of threads.
_FLAGS = [
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno"),
    *("-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
]


def load_library() -> ctypes.CDLL | None:
    """None, with a logged sentence, where there is no gcc or it fails."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.system() != "Linux":
        logger.info("no gcc here: the engine runs without its own CPU kernels")
        return None
    path = _folder() / f"cpu-{_fingerprint(compiler)}.so"
    try:
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning("the engine runs without its own CPU kernels: %s", error)
        return None


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        built.replace(path)


def _folder() -> Path:
    folder = Path.home() / ".cache" / "slime" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="slime-kernels-"))


def _fingerprint(compiler: str) -> str:
    """Of the source, the flags and the processor."""
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            cpu = line
            break
    text = f"{compiler} {_FLAGS} {cpu}\n{_SOURCE.read_text()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
