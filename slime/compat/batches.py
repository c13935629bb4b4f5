"""Batches of trainer hooks read like dictionaries: `rollout_data["log_probs"]`, `batch["advantages"]`.

A view shares the attributes of the batch it was made of, so a hook may use either form. Values are those
that hooks of earlier versions expect: a list with one tensor, or one number, per sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import wraps
from typing import Any

import numpy as np
import torch

from slime.core.errors import UserError
from slime.core.types import RolloutBatch, TrainBatch

# Key -> attribute, where they differ.
ATTRIBUTES = {
    "response_lengths": "response_lens",
    "total_lengths": "total_lens",
    "log_probs": "old_log_probs",
    "raw_reward": "raw_rewards",
    "rollout_routed_experts": "routed_experts",
}
_ROLLOUT_COLUMNS = [f.name for f in fields(RolloutBatch)]
_DTYPES = {"tokens": torch.int64, "loss_masks": torch.int32}
# Key -> packed column of a TrainBatch that is split into the response tokens of each sample.
_CUT = {
    "loss_masks": "loss_mask",
    "log_probs": "old_log_probs",
    **{
        name: name
        for name in (
            "advantages", "returns", "values", "old_log_probs", "ref_log_probs", "rollout_log_probs",
            "teacher_log_probs", "loss_weights",
        )
    },
}  # fmt: skip


def with_rollout_view(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook, whose last argument is a RolloutBatch, called with a view of it."""

    @wraps(fn)
    def call(*args: Any) -> Any:
        view = RolloutBatchView.of(args[-1])
        result = fn(*args[:-1], view)
        view.store()
        return result

    return call


def with_train_view(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss function, called with a view of its TrainBatch and a reducer of either shape."""

    @wraps(fn)
    def call(
        args: Any,
        batch: TrainBatch,
        logits: torch.Tensor,
        reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> Any:
        view = TrainBatchView.of(batch)
        return fn(args, view, logits, lambda values: reduce(view.packed(values)))

    return call


class _ByKey:
    """Read columns by key; a column that is None is a missing key."""

    __slots__ = ()
    _keys: tuple[str, ...]

    def _read(self, name: str) -> Any:
        raise NotImplementedError

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise KeyError(f"the batch has no {name!r}; it has {', '.join(self)}")
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._keys if name in self)

    def keys(self) -> list[str]:
        return list(self)

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self]

    def get(self, name: str, default: Any = None) -> Any:
        value = self._read(name) if name in self._keys else None
        return default if value is None else value


class RolloutBatchView(_ByKey, RolloutBatch):
    """A RolloutBatch whose columns can be read and set by key; `store` keeps changes made in place."""

    __slots__ = ("_columns", "_read_values")
    _keys = (*ATTRIBUTES, *_ROLLOUT_COLUMNS)
    _columns: dict[str, tuple[Any, Any]]  # attribute -> (its value, what the hook got for it)
    _read_values: dict[str, Any]  # attribute -> a copy of what the hook got, to find changes

    @classmethod
    def of(cls, batch: RolloutBatch) -> RolloutBatchView:
        view = object.__new__(cls)
        view.__dict__, view._columns, view._read_values = batch.__dict__, {}, {}
        return view

    def _read(self, name: str) -> Any:
        name = ATTRIBUTES.get(name, name)
        value = getattr(self, name)
        if name not in self._columns or self._columns[name][0] is not value:
            self._columns[name] = value, _as_tensors(name, value)
            self._read_values[name] = copy.deepcopy(self._columns[name][1])
        return self._columns[name][1]

    def __setitem__(self, name: str, value: Any) -> None:
        attribute = ATTRIBUTES.get(name, name)
        if attribute not in _ROLLOUT_COLUMNS:
            raise KeyError(
                f"a batch has no column {name!r}; its columns are {', '.join(self._keys)}"
            )
        setattr(self, attribute, _as_arrays(value))

    def store(self) -> None:
        """Write back lists and tensors that the hook changed in place."""
        for name, (value, read) in self._columns.items():
            if name not in _ROLLOUT_COLUMNS or getattr(self, name) is not value:
                continue
            if value is not None and not _same(read, self._read_values[name]):
                setattr(self, name, _as_arrays(read))
        self.__post_init__()


class TrainBatchView(_ByKey, TrainBatch):
    """A TrainBatch read by key: response tokens of each sample, in place of packed columns."""

    __slots__ = ()
    _keys = ("response_lengths", "total_lengths", "unconcat_tokens", *_CUT, "tokens", "cu_seqlens")

    @classmethod
    def of(cls, batch: TrainBatch) -> TrainBatchView:
        view = object.__new__(cls)
        view.__dict__ = batch.__dict__
        return view

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """Return a packed column [T] of the response tokens of all samples end to end."""
        if len(values) == len(self.tokens):
            return values
        index = torch.cat([torch.arange(s, s + n) for s, n in self._responses()])
        column = torch.zeros(len(self.tokens), dtype=values.dtype, device=values.device)
        return column.index_copy(0, index.to(values.device), values)

    def _read(self, name: str) -> Any:
        if name == "response_lengths":
            return self.response_lens
        if name == "total_lengths":
            return self._total_lens()
        if name in ("tokens", "cu_seqlens"):
            return getattr(self, name)
        if name == "unconcat_tokens":
            starts = zip(self._starts(), self._total_lens(), strict=True)
            return [self.tokens[start : start + length] for start, length in starts]
        column = getattr(self, _CUT[name])
        if column is None:
            return None
        return [column[start : start + length] for start, length in self._responses()]

    def _total_lens(self) -> list[int]:
        return [p + r for p, r in zip(self.prompt_lens, self.response_lens, strict=True)]

    def _starts(self) -> list[int]:
        starts: list[int] = self.cu_seqlens.tolist()
        for length, begin, end in zip(self._total_lens(), starts, starts[1:], strict=False):
            if end - begin < length:
                raise UserError(
                    "with --context-parallel-size above 1 a loss function reads packed columns "
                    "(batch.advantages, batch.labels, ...): a rank holds a slice of each sample"
                )
        return starts[:-1]

    def _responses(self) -> list[tuple[int, int]]:
        """Return start and length of each sample's response in a packed column."""
        rows = zip(self._starts(), self.prompt_lens, self.response_lens, strict=True)
        return [(start + prompt - 1, response) for start, prompt, response in rows]


def _as_tensors(name: str, column: Any) -> Any:
    if isinstance(column, np.ndarray):
        return column.tolist()
    if isinstance(column, list) and column and isinstance(column[0], np.ndarray):
        return [torch.tensor(row, dtype=_DTYPES.get(name)) for row in column]
    return column


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _as_arrays(column: Any) -> Any:
    if isinstance(column, torch.Tensor):
        column = column.detach().cpu()
        return (column.float() if column.is_floating_point() else column).numpy()
    return [_as_arrays(row) for row in column] if isinstance(column, list | tuple) else column
