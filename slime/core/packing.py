"""Pack rows of a RolloutBatch into one TrainBatch, and unpack packed columns into rows.

With context parallelism of size C each row is padded to a multiple of 2*C and split into 2*C chunks;
rank r holds chunks r and 2*C-1-r of every row, so that under causal attention all ranks have the
same work. Labels are shifted before the split: the last token of a chunk still has its label.
For C = 2 and a row of tokens 0..7, rank 0 holds [0, 1, 6, 7] and rank 1 holds [2, 3, 4, 5].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slime.core.types import ParallelInfo, RolloutBatch, TrainBatch

_VALUE_COLUMNS = (
    "advantages",
    "returns",
    "values",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
)


def pack(
    batch: RolloutBatch,
    rows: list[int],
    parallel: ParallelInfo,
    *,
    dummy: bool = False,
    equal_multiple: int | None = None,
    mtp_layers: int = 0,
) -> TrainBatch:
    """Pack the given rows, in this order, for this rank; a `dummy` has weight 0 in the loss.

    With `equal_multiple` all rows are padded to one length, the next multiple of it on each rank.

    All columns are this rank's slice, and so are `cu_seqlens` (its last entry is the slice's T) and
    `max_seqlen`: those of the padded sequences over all context ranks are `cp_size` times as large.
    """
    if batch.loss_weights is None:
        raise ValueError("the batch has no loss_weights; see slime.core.dp_schedule.loss_weights")
    layout = _Layout([len(batch.tokens[r]) for r in rows], parallel, equal_multiple)
    response_lens = [int(batch.response_lens[r]) for r in rows]
    prompt_lens = [int(n) - r for n, r in zip(layout.lens, response_lens, strict=True)]
    at_response = _ranges(layout.starts + np.array(prompt_lens) - 1, response_lens)

    def whole_column(column: list[np.ndarray]) -> np.ndarray:
        values = np.zeros(layout.total, np.float32)
        values[at_response] = np.concatenate([column[r] for r in rows])
        return values

    def response_column(column: list[np.ndarray]) -> torch.Tensor:
        return layout.local(whole_column(column))

    tokens, labels, position_ids = np.zeros((3, layout.total), np.int64)
    tokens[_ranges(layout.starts, layout.lens)] = np.concatenate([batch.tokens[r] for r in rows])
    labels[:] = layout.next_of(tokens)
    position_ids[:] = _ranges(np.zeros_like(layout.starts), layout.padded)
    columns: dict[str, Any] = {name: getattr(batch, name) for name in _VALUE_COLUMNS}
    values: dict[str, Any] = {n: response_column(c) for n, c in columns.items() if c is not None}
    zeros = torch.zeros(layout.local_total)
    ahead: dict[str, Any] = {}
    if mtp_layers:
        weights = np.zeros(layout.total, np.float32) if dummy else whole_column(batch.loss_weights)
        ahead["mtp_labels"] = layout.ahead(labels, mtp_layers)
        ahead["mtp_weights"] = layout.ahead(weights, mtp_layers)
    return TrainBatch(
        tokens=layout.local(tokens),
        position_ids=layout.local(position_ids),
        labels=layout.local(labels),
        loss_mask=zeros if dummy else response_column(batch.loss_masks),
        loss_weights=zeros if dummy else response_column(batch.loss_weights),
        cu_seqlens=layout.cu_seqlens,
        max_seqlen=int(max(layout.padded)) // parallel.cp_size,
        rows=list(rows),
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        num_trajectories=1
        if batch.num_trajectories is None
        else int(batch.num_trajectories[rows[0]]),
        dummy=dummy,
        routed_experts=_experts(batch, rows, layout),
        **_images(batch, rows, layout),
        **values,
        **ahead,
    )


def unpack(values: torch.Tensor, train_batch: TrainBatch, *, cp_size: int = 1) -> list[np.ndarray]:
    """Return the response part of each row of a packed column [T], as float32 arrays of length R.

    Under context parallelism `values` is the whole column, from `join_slices`.
    """
    flat = values.detach().float().cpu().numpy()
    starts = train_batch.cu_seqlens[:-1].tolist()
    return [
        flat[start * cp_size + prompt - 1 :][:response].copy()
        for start, prompt, response in zip(
            starts, train_batch.prompt_lens, train_batch.response_lens, strict=True
        )
    ]


def join_slices(slices: Sequence[torch.Tensor], train_batch: TrainBatch) -> torch.Tensor:
    """Return the whole padded column from the slices of the context ranks 0..C-1."""
    cp_size = len(slices)
    if cp_size == 1:
        return slices[0]
    padded = np.diff(train_batch.cu_seqlens.cpu().numpy()) * cp_size
    index = np.concatenate([zigzag_index(padded, rank, cp_size) for rank in range(cp_size)])
    gathered = torch.cat(list(slices))
    whole = torch.empty_like(gathered)
    whole[torch.from_numpy(index).to(whole.device)] = gathered
    return whole


def zigzag_index(padded_lens: np.ndarray, cp_rank: int, cp_size: int) -> np.ndarray:
    """Return the positions of one context rank's tokens in a packed column of padded rows."""
    chunk = np.asarray(padded_lens) // (2 * cp_size)
    starts = np.cumsum(padded_lens) - padded_lens
    pairs = np.stack([starts + chunk * cp_rank, starts + chunk * (2 * cp_size - 1 - cp_rank)], 1)
    return _ranges(pairs.reshape(-1), np.repeat(chunk, 2))


def _experts(batch: RolloutBatch, rows: list[int], layout: _Layout) -> torch.Tensor | None:
    """Return [T, layers, experts per token]; -1 for padding, which any expert may process."""
    if batch.routed_experts is None:
        return None
    chosen = [batch.routed_experts[r] for r in rows]
    experts = np.full((layout.total, *chosen[0].shape[1:]), -1, np.int16)
    experts[_ranges(layout.starts, layout.lens)] = np.concatenate(chosen)
    return layout.local(experts)


def _images(batch: RolloutBatch, rows: list[int], layout: _Layout) -> dict[str, Any]:
    """Return the image columns, with pixels only if one of the rows has an image."""
    if batch.positions is None or batch.images is None or batch.pixels is None:
        return {}
    positions = np.zeros((layout.total, 3), np.int64)
    positions[_ranges(layout.starts, layout.lens)] = np.concatenate(
        [batch.positions[r] for r in rows]
    )
    columns: dict[str, Any] = {"mrope_positions": layout.local(positions)}
    images = [batch.images[r] for r in rows]
    index, first, count = np.concatenate(images).T
    if not len(index):
        return columns
    row_starts = np.repeat(layout.starts, [len(row) for row in images])
    mask = np.zeros(layout.total, np.bool_)
    mask[_ranges(row_starts + first, count)] = True
    distinct, order = np.unique(index, return_inverse=True)
    pixels = [batch.pixels[i] for i in distinct]
    return {
        **columns,
        "image_mask": layout.local(mask),
        "pixel_values": torch.from_numpy(np.concatenate([image.values for image in pixels])),
        "image_grids": torch.tensor([image.grid for image in pixels]),
        "image_keys": [image.key for image in pixels],
        "image_order": order.tolist(),
    }


class _Layout:
    """Offsets of the rows in the whole packed sequence, and the part that this rank holds."""

    def __init__(self, lens: list[int], parallel: ParallelInfo, equal_multiple: int | None) -> None:
        unit = 2 * parallel.cp_size if parallel.cp_size > 1 else 1
        self.lens = np.array(lens)
        if equal_multiple is None:
            self.padded = -(-self.lens // unit) * unit
        else:
            unit = math.lcm(unit, equal_multiple * parallel.cp_size)
            self.padded = np.full_like(self.lens, -(-max(lens) // unit) * unit)
        self.starts = np.cumsum(self.padded) - self.padded
        self.total = int(self.padded.sum())
        self.local_total = self.total // parallel.cp_size
        offsets = np.concatenate([[0], np.cumsum(self.padded // parallel.cp_size)])
        self.cu_seqlens = torch.from_numpy(offsets.astype(np.int32))
        self._index = None
        if parallel.cp_size > 1:
            self._index = zigzag_index(self.padded, parallel.cp_rank, parallel.cp_size)

    def local(self, column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column if self._index is None else column[self._index])

    def next_of(self, column: np.ndarray) -> np.ndarray:
        """Return each position's next value in its row; 0 at the last one."""
        shifted = np.zeros_like(column)
        shifted[:-1] = column[1:]
        shifted[self.starts + self.padded - 1] = 0  # the next row's first value
        return shifted

    def ahead(self, column: np.ndarray, count: int) -> torch.Tensor:
        """Return this rank's part of the column shifted by 1, 2, ... `count`: [count, T]."""
        shifted = []
        for _ in range(count):
            column = self.next_of(column)
            shifted.append(self.local(column))
        return torch.stack(shifted)


def _ranges(starts: np.ndarray, lens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Concatenate start, start+1, ... of each (start, length): (5, 2), (9, 1) -> 5 6 9."""
    lens = np.asarray(lens)
    ends = np.cumsum(lens)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
