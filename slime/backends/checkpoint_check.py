"""Before a checkpoint is loaded its ranks compare its files with their checksums, each file once in all."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from slime.runlog.checkpoint_folder import check_share, damaged


class FileCheck:
    """Remembers what it has checked; all ranks call it together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._checked: set[str] = set()

    def __call__(self, path: str | Path) -> None:
        """ConfigError, on every rank, where a file is not what was written."""
        if str(path) in self._checked:
            return
        rank, world_size = dist.get_rank(), dist.get_world_size()
        problems: list[str | None] = [None] * world_size
        dist.all_gather_object(problems, check_share(path, rank, world_size), group=self._group)
        if found := next((problem for problem in problems if problem), None):
            raise damaged(Path(path), found)
        self._checked.add(str(path))
