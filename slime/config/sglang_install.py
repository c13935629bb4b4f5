"""Which SGLang engines are started with: the one installed here, or one in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from slime.config.env import read_env
from slime.core.errors import ConfigError
from slime.utils.machine import package_version

_ASK = "from importlib import metadata; print(metadata.version('sglang'))"
_TIMEOUT_S = 60


@dataclass(kw_only=True, frozen=True)
class SGLangInstall:
    python: str  # the interpreter to start servers with
    version: str


def find_sglang() -> SGLangInstall | None:
    """SLIME_SGLANG_PYTHON's where that is set, else this interpreter's; None without any."""
    return _find(read_env().sglang_python)


@cache
def _find(python: str | None) -> SGLangInstall | None:
    if not python:
        version = package_version("sglang")
        return (version and SGLangInstall(python=sys.executable, version=version)) or None
    try:
        reply = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"SLIME_SGLANG_PYTHON={python} is not a Python with SGLang: install it there, or unset the "
            "variable"
        ) from error
    return SGLangInstall(python=python, version=reply.stdout.strip())
