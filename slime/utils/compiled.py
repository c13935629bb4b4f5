"""Code compiled for this machine at its first use: functions by torch.compile on a GPU, C kernels by gcc."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be reordered, which vectorization needs, but NaN and infinity keep their meaning. OpenMP is
# torch's: a library of this name is already loaded, so both share one thread pool.
_FLAGS = [
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno"),
    *("-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
]


def compiled_on_gpu(function: Function) -> Function:
    """Compile a function for any shape when it is called with GPU tensors; on a CPU run it as written.

    If the compiler does not work (it needs a C compiler besides Triton), one warning is logged.
    """
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if not first.is_cuda:
            return function(first, *rest, **options)
        if not compiled:
            import torch

            compiled.append(torch.compile(function, dynamic=True))
        try:
            return compiled[0](first, *rest, **options)
        except Exception as error:
            if compiled[0] is function or not _is_compiler_error(error):
                raise
            logger.warning("%s runs uncompiled: %s", function.__name__, error)
            compiled[0] = function
            return function(first, *rest, **options)

    return call  # type: ignore[return-value]


def _is_compiler_error(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def load_library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled library; log why and return None if gcc is missing or fails."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.system() != "Linux":
        logger.info("gcc is missing: %s is not used", source.name)
        return None
    path = _folder() / f"{source.stem}-{_fingerprint(compiler, source)}.so"
    try:
        if not path.exists():
            _run_gcc(compiler, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning("%s is not used: %s", source.name, error)
        return None


def _run_gcc(compiler: str, source: Path, path: Path) -> None:
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
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    text = f"{compiler} {_FLAGS} {cpu}\n{source.read_text()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
