"""Updates an adapter from a trainer's buffer that stays open, with views that are created once.

    the trainer's buffer ──copy──▶ slot of the adapter ──copy──▶ scratch buffer of the same layout ──▶ checksum

The checksum covers the bits read back from the slot, which is the memory that requests use.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from slime.config.peft_files import PEFT_PREFIX
from slime.engine.lora.bank import LoraBank
from slime.engine.lora.peft_format import pair_tensors, tensor_name
from slime.engine.scheduler.sampling_params import RequestError
from slime.engine.weights import TensorMeta, named_views
from slime.weights.checksum import RunningChecksums, shapes_digest
from slime.weights.ipc import finish_reading, import_buffer


class LayoutUnknown(Exception):
    """The trainer must send the whole adapter: its buffer is not open, or the slot has changed."""


class KeptBuffer:
    """A buffer of another process with contiguous tensors of one dtype, sorted by name.

    `tensor` is on the device of the slots: the buffer itself, or a copy that `refresh` updates.
    """

    def __init__(
        self, layout: str, handle: Any, metas: Sequence[TensorMeta], device: torch.device
    ) -> None:
        size = _check_order(metas)
        self.layout, self.metas = layout, metas
        self._stack = ExitStack()
        try:
            self._shared = self._stack.enter_context(import_buffer(handle))[:size]
        except (KeyError, TypeError, OSError, ValueError) as error:
            raise RequestError(f"cannot open the shared buffer: {error}") from error
        self.tensor = self._shared.to(device)

    def views(self, of: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors by name, or those of another buffer of this layout."""
        return named_views(self.tensor if of is None else of, self.metas)

    def refresh(self) -> None:
        if self.tensor.device != self._shared.device:
            self.tensor.copy_(self._shared)

    def close(self) -> None:
        """Wait for queued reads of the buffer, then unmap it."""
        finish_reading(self.tensor)
        del self.tensor, self._shared
        self._stack.close()


class InPlaceUpdate:
    """Copies one adapter from its buffer into its slot; `modules` are PEFT's names and the bank's."""

    def __init__(
        self,
        bank: LoraBank,
        buffer: KeptBuffer,
        *,
        slot: int,
        rank: int,
        modules: dict[str, str],
    ) -> None:
        self._bank, self._buffer, self._slot = bank, buffer, slot
        self._modules = modules
        ranks = dict.fromkeys(modules.values(), rank)
        names = sorted(tensor_name(module, side) for module in modules for side in "AB")
        assert names == [meta.name for meta in buffer.metas], "the buffer has checked its names"
        self._names = "\n".join(names)
        self._scratch = torch.empty_like(buffer.tensor)
        self._held = bank.matrices(slot, ranks)
        self._sent = self._by_slot(buffer.views())
        self._read = self._by_slot(buffer.views(self._scratch))
        self._addresses, self._binding = bank.addresses(), bank.bindings[slot]
        self.digest = bound_digest(bank, slot, modules)  # as long as `is_current`

    @property
    def layout(self) -> str:
        return self._buffer.layout

    def is_current(self) -> bool:
        """Return whether the slot still holds exactly these modules, at unchanged addresses."""
        return (
            self._bank.bindings[self._slot] == self._binding
            and self._bank.addresses() == self._addresses
        )

    def copy(self) -> None:
        self._buffer.refresh()
        torch._foreach_copy_(self._held, self._sent)  # pyright: ignore[reportPrivateImportUsage]

    def checksum(self) -> int:
        """Return the checksum of the slot; it also means that the trainer's buffer has been read."""
        torch._foreach_copy_(self._read, self._held)  # pyright: ignore[reportPrivateImportUsage]
        sums = RunningChecksums()
        sums.add([(self._names, self._scratch.view(self._buffer.metas[0].dtype))])
        return sums.read()[self._names]

    def close(self) -> None:
        del self._sent, self._read, self._held, self._scratch
        self._buffer.close()

    def _by_slot(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the tensors in the order and the shapes of `self._held`."""
        pairs = pair_tensors(tensors)
        return self._bank.as_in_slots({site: pairs[name] for name, site in self._modules.items()})


def bound_digest(bank: LoraBank, slot: int, modules: dict[str, str]) -> str:
    """Return the digest of the names and shapes of all matrices that a slot holds for these modules."""
    return shapes_digest(
        (tensor_name(module, side), shape)
        for module, site in modules.items()
        for side, shape in zip("AB", bank.shapes(slot, site), strict=True)
    )


def _check_order(metas: Sequence[TensorMeta]) -> int:
    """Return the size of contiguous tensors; raise RequestError if they are not contiguous and sorted."""
    end, names = 0, [meta.name for meta in metas]
    for meta in metas:
        if meta.offset != end or meta.dtype != metas[0].dtype:
            raise RequestError("tensors of a kept buffer must be contiguous and of one dtype")
        end += meta.num_bytes
    if not metas or names != sorted(names) or not all(n.startswith(PEFT_PREFIX) for n in names):
        raise RequestError(f"tensors of a kept buffer must be sorted by name, {PEFT_PREFIX}...")
    return end
