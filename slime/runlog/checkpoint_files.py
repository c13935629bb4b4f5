"""Sizes and checksums of the files of a checkpoint, and fsync.

Each rank computes the checksums of its large files right after writing them, while they are in the
page cache, into `.checksums_<rank>.json`; `take_checksums` merges them at commit and computes all others.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK, _BUFFER = 32 << 20, 1 << 18
_THREADS = 4
_PARTS = ".checksums_*.json"
_WRITER = re.compile(r"__(\d+)_\d+\.distcp$")


def file_checksum(path: str | Path) -> str:
    """Return the CRC-32 of the CRC-32s of the file's blocks of 32 MiB, which threads compute in parallel."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO must not block
    try:
        starts = range(0, os.fstat(handle).st_size, _BLOCK)
        with ThreadPoolExecutor(min(_THREADS, max(len(starts), 1))) as pool:
            sums = pool.map(lambda start: _block_checksum(handle, start), starts)
            joined = b"".join(value.to_bytes(4, "little") for value in sums)
    finally:
        os.close(handle)
    return f"{zlib.crc32(joined):08x}"


def _block_checksum(handle: int, start: int) -> int:
    """Compute the CRC-32 of one block through a buffer that fits a core's cache."""
    buffer = memoryview(bytearray(_BUFFER))
    value, position, end = 0, start, start + _BLOCK
    while position < end and (count := os.preadv(handle, [buffer[: end - position]], position)):
        value = zlib.crc32(buffer[:count], value)
        position += count
    return value


def record_checksums(folder: str | Path, files: Iterable[Path], rank: int) -> None:
    """Store the checksums of files that this rank has just written below `folder`, for the commit."""
    folder = Path(folder)
    sums = {str(file.relative_to(folder)): file_checksum(file) for file in files}
    (folder / _PARTS.replace("*", str(rank))).write_text(json.dumps(sums))


def take_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of all files below `folder`, and remove the files of the ranks."""
    known: dict[str, str] = {}
    for part in folder.rglob(_PARTS):
        inside = part.parent.relative_to(folder)
        known |= {str(inside / name): value for name, value in json.loads(part.read_text()).items()}
        part.unlink()
    return {name: known.get(name) or file_checksum(folder / name) for name in file_sizes(folder)}


def file_sizes(folder: Path) -> dict[str, int]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def wrong_size(folder: Path, sizes: Mapping[str, int]) -> str | None:
    """Describe the first file that is missing or truncated."""
    for name, size in sizes.items():
        file = folder / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size < size:
            return f"{name} has {file.stat().st_size} of its {size} bytes"
    return None


def wrong_checksum(
    folder: Path, checksums: Mapping[str, str], names: Iterable[str] | None = None
) -> str | None:
    """Describe the first of these files whose content differs from what was written."""
    for name in checksums if names is None else names:
        if name not in checksums:
            continue
        try:
            found = file_checksum(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != checksums[name]:
            return f"{name} is not what was written (checksum {found}, not {checksums[name]})"
    return None


def smallest_first(sizes: Mapping[str, int], budget: int) -> list[str]:
    """Return the smallest files that fit into `budget` bytes."""
    chosen = []
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        if budget < size:
            break
        chosen.append(name)
        budget -= size
    return chosen


def share_of_rank(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return the files that a rank checks: those that it reads itself, if their names tell."""
    numbered = enumerate(sorted(names))
    writers = ((name, _WRITER.search(name), number) for number, name in numbered)
    return [n for n, match, i in writers if (int(match[1]) if match else i) % world_size == rank]


def sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            sync_file(Path(folder) / name)
        sync_file(Path(folder))


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO must not block
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
