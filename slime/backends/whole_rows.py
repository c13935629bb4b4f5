"""Convert packed columns to one tensor per sample, as hooks see them, and back.

Under context parallelism a rank holds a zigzag slice of every sample. The slices of other ranks are
gathered without gradient: the gradient of a rank's own tokens is complete, unless a hook makes the
loss of one token depend on the loss of another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from slime.core.packing import join_slices, zigzag_index
from slime.core.types import TrainBatch


class WholeRows:
    def __init__(self, batch: TrainBatch, cp_group: dist.ProcessGroup | None) -> None:
        self.batch, self.group = batch, cp_group
        self.cp_size = 1 if cp_group is None else dist.get_world_size(cp_group)
        starts = (batch.cu_seqlens[:-1] * self.cp_size).tolist()
        rows = zip(starts, batch.prompt_lens, batch.response_lens, strict=True)
        self._spans = [(start + prompt - 1, response) for start, prompt, response in rows]

    def cut(self, column: torch.Tensor) -> list[torch.Tensor]:
        """Return the response tokens of each sample of a packed column [T], as tensors [R]."""
        whole = self._whole(column)
        return [whole[start : start + length] for start, length in self._spans]

    def packed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's column [T] from all response tokens end to end, or one value."""
        index = torch.cat([torch.arange(s, s + n) for s, n in self._spans]).to(flat.device)
        total = len(self.batch.tokens) * self.cp_size
        column = torch.zeros(total, dtype=torch.float32, device=flat.device)
        column = column.index_copy(0, index, flat.to(column).expand(len(index)))
        if self.group is None:
            return column
        padded = (self.batch.cu_seqlens.diff() * self.cp_size).cpu().numpy()
        mine = zigzag_index(padded, dist.get_rank(self.group), self.cp_size)
        return column[torch.from_numpy(mine).to(column.device)]

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """Return value / cp_size with the full gradient: the sum over CP ranks is then `value`."""
        return value - value.detach() * (1 - 1 / self.cp_size)

    def largest(self, column: torch.Tensor) -> torch.Tensor:
        value = column.max()
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value

    def _whole(self, column: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return column
        slices = [torch.empty_like(column) for _ in range(self.cp_size)]
        dist.all_gather(slices, column.detach().contiguous(), group=self.group)
        slices[dist.get_rank(self.group)] = column
        return join_slices(slices, self.batch)
