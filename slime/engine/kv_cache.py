"""The KV cache: its tensors, its size, and releasing memory while a colocated trainer uses the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slime.core.errors import UserError
from slime.engine.arguments import EngineArgs

if TYPE_CHECKING:
    from slime.engine.models.model_runner import ModelRunner


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What one attention layer stores per token."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


class KVCache:
    """keys[layer] and values[layer] are [pages, page_size, heads, dim]; gathering whole pages gives a
    sequence's keys without further copying. Page 0 is the padding page."""

    def __init__(
        self,
        layers: dict[int, LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.allocate()

    def allocate(self) -> None:
        for index, shape in self.layers.items():
            self.keys[index] = self._pages(shape.num_heads, shape.key_dim)
            self.values[index] = self._pages(shape.num_heads, shape.value_dim)

    def free(self) -> None:
        self.keys.clear()
        self.values.clear()

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store one token per slot; a slot is page * page_size + offset. keys: [T, heads, dim]."""
        self.keys[layer].view(-1, *keys.shape[1:]).index_copy_(0, slots, keys)
        self.values[layer].view(-1, *values.shape[1:]).index_copy_(0, slots, values)

    def wipe(self, pages: list[int]) -> None:
        """Zero pages: SDPA multiplies masked positions by 0, which must not be a NaN of an earlier request."""
        index = torch.tensor(pages, device=self.device)
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor.index_fill_(0, index, 0)

    def _pages(self, num_heads: int, dim: int) -> torch.Tensor:
        # Zeros, not empty: SDPA multiplies masked positions by 0, and 0 x NaN is NaN.
        shape = (self.num_pages + 1, self.page_size, num_heads, dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


TAGS: tuple[str, ...] = ("weights", "kv_cache", "cuda_graph")
_CPU_CACHE_BYTES = 2 << 30
_DEFAULT_RUNNING = 256
_DEFAULT_FRACTION = 0.85
_DEFAULT_CHUNK = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """num_pages x page_size tokens are cached; one request holds at most max_pages_per_request."""

    num_pages: int
    max_pages_per_request: int
    max_running: int
    chunk_size: int


def choose_sizes(args: EngineArgs, runner: ModelRunner) -> Sizes:
    """Take the sizes from the options, or use as much memory as the device has free."""
    element = torch.empty(0, dtype=runner.dtype).element_size()
    page_bytes = sum(layer.elements for layer in runner.layers.values()) * element * args.page_size
    max_running = args.max_running_requests or _DEFAULT_RUNNING
    pages_per_request = -(-(runner.context_len + 1) // args.page_size)
    if args.max_total_tokens is not None:
        num_pages = args.max_total_tokens // args.page_size
    elif runner.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(runner.device)
        reserved = total * (1 - (args.mem_fraction_static or _DEFAULT_FRACTION))
        num_pages = int((free - reserved) // page_bytes)
    else:
        num_pages = min(max_running * pages_per_request, _CPU_CACHE_BYTES // page_bytes)
    if num_pages < 1:
        raise UserError("no memory is left for the KV cache; raise --mem-fraction-static")
    return Sizes(
        num_pages=num_pages,
        max_pages_per_request=pages_per_request,
        max_running=max_running,
        chunk_size=args.chunked_prefill_size or _DEFAULT_CHUNK[runner.device.type],
    )


class MemoryReleaser:
    """Moves weights to host memory and frees the KV cache, and restores both."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def release(self, tag: str) -> None:
        self._runner.invalidate()
        if tag == "kv_cache":
            assert self._runner.cache is not None
            self._runner.cache.free()
        elif tag == "weights" and self._runner.device.type == "cuda":
            self._move(torch.device("cpu"))
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self, tag: str) -> None:
        if tag == "kv_cache":
            assert self._runner.cache is not None
            self._runner.cache.allocate()
        elif tag == "weights" and self._runner.device.type == "cuda":
            self._move(self._runner.device)

    def _move(self, device: torch.device) -> None:
        """Move all tensors; parameter objects, tied weights and views into shared storage stay what they are."""
        model = self._runner.model
        moved: dict[int, torch.Tensor] = {}  # by address of their storage
        for tensor in [*model.parameters(), *model.buffers()]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in moved:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                moved[storage.data_ptr()] = whole.to(device)
            whole = moved[storage.data_ptr()].view(tensor.dtype)
            tensor.data = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
