"""Files in folders that somebody else may have made.

`open_regular` and `read_regular`: no pipe blocks the reader, no device is endless. `sign` and `is_signed`: HMACs
under a key in the user's home tell files that this user's processes wrote from those of others.

~/.slime/functions.key   32 random bytes, mode 0600, made at the first use
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from slime.core.errors import UserError

SIGNATURE_BYTES = 32
_KEY_BYTES = 32


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file; raise OSError for anything else, without waiting for the writer of a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file; raise OSError if it has more than `most`."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has over {most >> 20} MiB", str(path))
    return content


def sign(content: bytes) -> bytes:
    """Return the HMAC of the content; raise UserError or OSError if this user has no usable key."""
    path = Path.home() / ".slime" / "functions.key"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        _make_key(path)
    key = read_private(path)
    if len(key) != _KEY_BYTES:  # truncated by a full disk: anybody could sign with an empty key
        raise UserError(f"{path} is damaged: remove it, and a new one is made")
    return hmac.digest(key, content, "sha256")


def is_signed(content: bytes, signature: bytes) -> bool:
    return hmac.compare_digest(signature, sign(content))


def write_private(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def read_private(path: Path) -> bytes:
    """Read a regular file that this user owns and nobody else may read or write."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"{path} is not loaded: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(file.fileno())
        private = stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077
        if not private or facts.st_uid != os.getuid():
            raise UserError(f"{path} is not loaded: it is not a file of mode 0600 of this user")
        return file.read()


def _make_key(path: Path) -> None:
    """Create the key whole: another process sees no file, or all of its bytes."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_private(temporary, secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # of another process at the same time
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
