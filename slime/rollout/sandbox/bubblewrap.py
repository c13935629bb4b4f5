"""The bubblewrap program of this system."""

from __future__ import annotations

import shutil
import subprocess

from slime.core.errors import UserError


def find_bwrap() -> str:
    """Return the path of bubblewrap, or raise a UserError that says how to get it."""
    path = shutil.which("bwrap")
    if path is None:
        raise UserError(
            "programs of the model run in bubblewrap, which is not installed: "
            "apt-get install bubblewrap (or dnf install bubblewrap)"
        )
    return path


def bubblewrap_version() -> str:
    """Return the version, or an empty string where bubblewrap is not installed."""
    path = shutil.which("bwrap")
    if path is None:
        return ""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.split()[-1] if done.stdout.split() else "unknown"
