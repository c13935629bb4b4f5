"""Process group and progress display of a conversion, for both directions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from slime.utils.device import collective_backend, device_type


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks that torchrun started, or form a group of this process alone."""
    if dist.is_torchelastic_launched():
        dist.init_process_group(collective_backend())
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public, not in __all__
        dist.init_process_group(collective_backend(), store=store, rank=0, world_size=1)
    if device_type() == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        yield
    finally:
        dist.destroy_process_group()


class ByteCount:
    """Count converted bytes up to `total` and show the progress."""

    def __init__(self, title: str, total: int, bar: Progress | None, *, quiet: bool) -> None:
        self._title, self._total, self._bar, self._quiet = title, max(total, 1), bar, quiet
        self._task = bar.add_task(title, total=total) if bar else None
        self._done = 0

    def advance(self, nbytes: int) -> None:
        before = self._done * 10 // self._total
        self._done += nbytes
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, nbytes)
        elif not self._quiet and self._done * 10 // self._total > before:
            share = self._done / self._total
            print(f"{self._title}: {share:.0%} of {decimal(self._total)}", flush=True)


@contextmanager
def progress(title: str, total: int, *, shown: bool) -> Iterator[ByteCount]:
    """Show a bar on a terminal, a line per 10 % elsewhere, nothing unless `shown`."""
    if not shown or not sys.stdout.isatty():
        yield ByteCount(title, total, None, quiet=not shown)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        yield ByteCount(title, total, bar, quiet=False)
