"""JSON-lines files that survive a crash: each line is appended in one write."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from slime.utils.untrusted_files import open_regular

_MAX_LINE_BYTES = 1 << 26
_MAX_DEPTH = 64  # of a record's values

logger = logging.getLogger(__name__)


def append_lines(path: Path, records: Sequence[Mapping[str, object]]) -> list[int]:
    """Append the records, all or none, after removing a last line that was never finished.

    Return the byte offset of each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_partial_line(path)
    lines = [dump_line(record) for record in records]
    with path.open("ab", buffering=0) as file:
        start = os.fstat(file.fileno()).st_size
        write_whole(file, b"".join(lines))
    return list(accumulate(map(len, lines), initial=start))[:-1]


def dump_line(record: Mapping[str, object]) -> bytes:
    """Return the line of a record; values that JSON cannot hold become text, so that a record never ends a run."""
    try:
        return orjson.dumps(record) + b"\n"
    except TypeError:
        return orjson.dumps(_storable(record)) + b"\n"


def _storable(value: object, depth: int = 0) -> object:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        return {_text(key): _storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        return [_storable(item, depth + 1) for item in value]
    item = getattr(value, "item", None)  # scalars of numpy and torch
    plain = item() if callable(item) and getattr(value, "size", 0) == 1 else None
    return float(plain) if isinstance(plain, int | float) else _text(value)


def _text(value: object) -> str:
    """Return text that UTF-8 can hold: lone surrogates come from file names and broken JSON."""
    return str(value).encode("utf-8", "replace").decode()


def write_whole(file: FileIO, content: bytes) -> None:
    """Append all of the content, or leave the file as it was and raise.

    On a full disk a write takes the part that fits and returns; only the next one raises.
    """
    size = os.fstat(file.fileno()).st_size
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        with suppress(OSError):
            file.truncate(size)
        raise OSError(error.errno, error.strerror, str(file.name)) from None


class LogErrors:
    """Reports the first failed write of a log as a warning: a full disk must not end the run."""

    def __init__(self, warning: str) -> None:
        """`warning` has a %s for the error."""
        self._warning, self._warned = warning, False

    @contextmanager
    def warned_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                logger.warning(self._warning, error)
            self._warned = True


class LogWrites:
    """Writes of a log, in order. On a full disk the latest `most` wait in memory until there is room."""

    def __init__(self, warning: str, most: int | None = None) -> None:
        self.errors = LogErrors(warning)
        self._waiting: deque[Callable[[], object]] = deque(maxlen=most)
        self._lock = threading.Lock()

    def add(self, write: Callable[[], object]) -> None:
        """Call `write` now, or later if it raises OSError; it writes all or nothing."""
        with self._lock:
            self._waiting.append(write)
        self.flush()

    def flush(self) -> None:
        with self.errors.warned_once():
            self.require()

    def require(self) -> None:
        """Write what waits; raise OSError if there is still no room."""
        with self._lock:
            while self._waiting:
                self._waiting[0]()
                self._waiting.popleft()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, if it exists; a line truncated by a crash or without end is skipped."""
    if not path.exists():
        return
    with open_regular(path) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            if len(line) == _MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_MAX_LINE_BYTES)
                continue
            record = parse_line(line)
            if record is not None:
                yield record


class LineTail:
    """Reads a growing file in steps: each call of `read` returns the complete lines added since the last.

    A file that was replaced or truncated (a resumed run rewrites its records) is read from the
    beginning, and `restarts` counts up. A line that is longer than a whole step is skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.restarts = path, 0
        self.offset = 0  # of the first byte that was not returned yet
        self._inode: int | None = None
        self._skipping = False  # inside of a line that is too long

    def read(self, limit: int = 1 << 28) -> list[tuple[int, bytes]]:
        """Return (byte offset, line) pairs; at most about `limit` bytes at a time."""
        try:
            with open_regular(self.path) as file:
                return self._lines(file, limit)
        except OSError:  # it does not exist yet, or is being replaced
            return []

    def _lines(self, file: BufferedReader, limit: int) -> list[tuple[int, bytes]]:
        found = os.fstat(file.fileno())
        if (self._inode not in (None, found.st_ino)) or found.st_size < self.offset:
            self.offset, self.restarts, self._skipping = 0, self.restarts + 1, False
        self._inode = found.st_ino
        if found.st_size == self.offset:
            return []
        file.seek(self.offset)
        content = file.read(limit)
        end = content.rfind(b"\n") + 1
        if not end and len(content) == limit:
            self.offset, self._skipping = self.offset + len(content), True
        if not end:
            return []
        lines, start = [], self.offset
        for line in content[:end].splitlines(keepends=True):
            lines.append((start, line))
            start += len(line)
        self.offset, skipped = start, self._skipping
        self._skipping = False
        return lines[1:] if skipped else lines


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrite the file with the records that `keep` accepts; return the number of lines removed.

    The file is replaced atomically.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and (r := parse_line(line)) and keep(r)]
    if len(kept) < len(lines):
        replace_file(path, b"".join(kept))
    return len(lines) - len(kept)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader, or a crash, sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # A new file: in a folder of another user an existing one may be a link to anything.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb", buffering=0) as file:
            write_whole(file, content)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def drop_partial_line(path: Path) -> None:
    """Truncate the file after its last newline: the rest was never completely written."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is not a JSON object."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None
