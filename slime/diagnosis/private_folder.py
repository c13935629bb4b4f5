"""The folder of a Ray that this run started: its token, sockets and logs, inaccessible to other users."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "slime-ray-"
# A socket's path may have 107 bytes. Below this folder Ray needs up to 68:
# /ray/session_2026-11-16_09-56-42_172399_4194304/sockets/plasma_store
_LONGEST = 107 - 68
_YOUNG_S = 60.0  # its creator may not have locked a newer one yet


class PrivateFolder:
    """A folder that only this user can enter, with a fresh token in it; stale ones are removed."""

    def __init__(self) -> None:
        parent = _parent()
        remove_stale_folders(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        _lock(self._handle)
        self.token_path = self.path / "token"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(self.token_path, flags, 0o600), "w") as file:
            os.fchmod(file.fileno(), 0o600)  # regardless of the umask
            file.write(secrets.token_hex(32))

    @property
    def ray_path(self) -> Path:
        """Return Ray's own folder, which Ray makes accessible to everybody."""
        return self.path / "ray"

    def keep_logs(self) -> Path:
        """Move Ray's logs to a folder that is kept until the next start; return it."""
        kept = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}logs-", dir=self.path.parent))
        for logs in self.ray_path.glob("session_2*/logs"):
            shutil.move(logs, kept)
        return kept

    def close(self) -> None:
        os.close(self._handle)


def remove_stale_folders(parent: Path) -> None:
    """Remove this user's folders whose runs were killed together with their keepers."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # removed meanwhile, or another user's
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(handle)
                young = time.time() - status.st_mtime < _YOUNG_S
                if status.st_uid == os.getuid() and not young and _lock(handle):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


def _parent() -> Path:
    """Return TMPDIR if a socket's path fits below it, else /tmp."""
    chosen = Path(tempfile.gettempdir())
    fits = len(os.fsencode(chosen)) + len(f"/{_PREFIX}12345678") <= _LONGEST
    return chosen if fits else Path("/tmp")


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
