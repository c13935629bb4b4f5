"""Compile a C file of kernels for this processor, once, and load it."""

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
# Sums may be reordered, which vectorization needs, but NaN and infinity keep their meaning. OpenMP is
# torch's: a library of this name is already loaded, so both share one thread pool.
_FLAGS = [
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno"),
    *("-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
]


def load_library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled library; log why and return None if gcc is missing or fails."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.system() != "Linux":
        logger.info("gcc is missing: %s is not used", source.name)
        return None
    path = _folder() / f"{source.stem}-{_fingerprint(compiler, source)}.so"
    try:
        if not path.exists():
            _compile(compiler, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning("%s is not used: %s", source.name, error)
        return None


def _compile(compiler: str, source: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *_FLAGS, str(source), "-o", str(built), "-lm"]
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


def _fingerprint(compiler: str, source: Path) -> str:
    """Hash the sources, the compiler flags and the features of the processor."""
    cpu = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            cpu = line
            break
    text = f"{compiler} {_FLAGS} {cpu}\n{source.read_text()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
