"""JSON-lines files that survive a crash: each line is appended in one write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import orjson


def append_lines(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Append the records, all or none, after removing a last line that was never finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_partial_line(path)
    with path.open("ab", buffering=0) as file:
        write_whole(file, b"".join(orjson.dumps(record) + b"\n" for record in records))


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


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, if it exists; a line truncated by a crash is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            record = _parse(line)
            if record is not None:
                yield record


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrite the file with the records that `keep` accepts; return the number of lines removed.

    The file is replaced atomically.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and (r := _parse(line)) and keep(r)]
    if len(kept) < len(lines):
        replace_file(path, b"".join(kept))
    return len(lines) - len(kept)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader, or a crash, sees the old content or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb", buffering=0) as file:
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


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None
