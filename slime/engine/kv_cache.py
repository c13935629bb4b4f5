"""The KV cache and recurrent states: tensors, sizes, and releasing them while a colocated trainer works.

Recurrent states of gated delta nets are stored one per row of the page table, and for prefixes::

    rows    0 .. max_running - 1     running requests
            max_running              the padding row
            after it                 states at nodes of the prefix cache

A state summarizes all tokens before it in a fixed size and, unlike keys and values, cannot be truncated: a
prefix can be reused only up to a token after which the state was saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from slime.algorithms.delta_layers import DeltaState
from slime.algorithms.gated_delta import DeltaHeads
from slime.core.errors import UserError
from slime.engine.arguments import EngineArgs

if TYPE_CHECKING:
    from slime.engine.models.model_runner import ModelRunner


RESET = -1  # as the source of a copy: a state of zeros


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """What the delta nets of a model store per row; `layers` are their indices in the model."""

    layers: tuple[int, ...]
    heads: DeltaHeads
    window: int  # inputs of the convolution that are kept

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one row."""
        heads = self.heads
        matrices = heads.num_value * heads.key_dim * heads.value_dim * 4
        return len(self.layers) * (matrices + self.window * sum(heads.widths) * dtype.itemsize)


class StateCache:
    """`windows` [rows, layers, K - 1, C] in the model's dtype, `matrices` [rows, layers, heads, key dim,
    value dim] in fp32: all layers of a row are one block of memory, which is copied at once."""

    def __init__(
        self, shape: StateShape, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.num_rows = shape, num_rows
        self._dtype, self.device = dtype, device
        self._index = {layer: index for index, layer in enumerate(shape.layers)}
        self.windows = self.matrices = torch.empty(0)  # until `allocate`

    def allocate(self) -> None:
        shape, first = self.shape, (self.num_rows, len(self.shape.layers))
        heads, width = shape.heads, sum(shape.heads.widths)
        matrix = (heads.num_value, heads.key_dim, heads.value_dim)
        self.windows = torch.zeros(
            *first, shape.window, width, dtype=self._dtype, device=self.device
        )
        self.matrices = torch.zeros(*first, *matrix, dtype=torch.float32, device=self.device)

    def free(self) -> None:
        self.windows = self.matrices = torch.empty(0)

    def index_of(self, layer: int) -> int:
        """Return the position of a layer of the model among those with states."""
        return self._index[layer]

    def read(self, layer: int, rows: torch.Tensor) -> DeltaState:
        index = self._index[layer]
        return DeltaState(
            windows=self.windows[:, index].index_select(0, rows),
            matrices=self.matrices[:, index].index_select(0, rows),
        )

    def write(self, layer: int, rows: torch.Tensor, state: DeltaState) -> None:
        index = self._index[layer]
        self.windows[:, index].index_copy_(0, rows, state.windows)
        self.matrices[:, index].index_copy_(0, rows, state.matrices)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy rows (source, target) one after the other; the source RESET is zeros."""
        for source, target in copies:
            for tensor in (self.windows, self.matrices):
                if source == RESET:
                    tensor[target].zero_()
                else:
                    tensor[target].copy_(tensor[source])


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
        states: StateCache | None = None,
    ) -> None:
        self.states = states
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
        if self.states is not None:
            self.states.allocate()

    def free(self) -> None:
        self.keys.clear()
        self.values.clear()
        if self.states is not None:
            self.states.free()

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
_FRACTION = "--mem-fraction-static (of a run: --sglang-mem-fraction-static)"
_DEFAULT_CHUNK = {"cpu": 2048, "cuda": 8192}
_STATE_SHARE = 0.9 / 1.9  # recurrent states' share of the cache memory, as in SGLang


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """num_pages x page_size tokens are cached; one request holds at most max_pages_per_request."""

    num_pages: int
    max_pages_per_request: int
    max_running: int
    chunk_size: int
    num_saved_states: int = 0  # recurrent states that the prefix cache can hold


def choose_sizes(args: EngineArgs, runner: ModelRunner) -> Sizes:
    """Take the sizes from the options, or use the free memory of the device."""
    element = torch.empty(0, dtype=runner.dtype).element_size()
    page_bytes = sum(layer.elements for layer in runner.layers.values()) * element * args.page_size
    pages_per_request = -(-(runner.context_len + 1) // args.page_size)
    budget = _cache_bytes(args, runner.device)
    if runner.tower is not None and runner.device.type == "cuda":
        budget -= runner.tower.cached_bytes
    max_running, num_saved = args.max_running_requests or _DEFAULT_RUNNING, 0
    if runner.state_shape is not None:
        state_bytes = runner.state_shape.nbytes(runner.dtype)
        max_running, num_saved = count_states(args, budget, state_bytes)
        if runner.device.type == "cuda" or args.max_total_tokens is None:
            # Besides one page of the KV cache and the padding row.
            _check_states_fit(max_running, int((budget - page_bytes) // state_bytes) - 1)
        budget -= (max_running + 1 + num_saved) * state_bytes
    num_pages = int(budget // page_bytes)
    if args.max_total_tokens is not None:
        num_pages = args.max_total_tokens // args.page_size
    elif runner.device.type != "cuda":
        num_pages = min(max_running * pages_per_request, num_pages)
    if num_pages < 1:
        raise UserError(f"no memory is left for the KV cache; raise {_FRACTION}")
    return Sizes(
        num_pages=num_pages,
        max_pages_per_request=pages_per_request,
        max_running=max_running,
        chunk_size=args.chunked_prefill_size or _DEFAULT_CHUNK[runner.device.type],
        num_saved_states=num_saved,
    )


def _cache_bytes(args: EngineArgs, device: torch.device) -> float:
    """Return the memory for the KV cache and recurrent states."""
    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    torch.cuda.empty_cache()  # frees the originals of fused weights
    free, total = torch.cuda.mem_get_info(device)
    return free - total * (1 - (args.mem_fraction_static or _DEFAULT_FRACTION))


def count_states(args: EngineArgs, budget: float, state_bytes: int) -> tuple[int, int]:
    """Return how many requests run at a time, and how many states are saved for prefixes.

    Without --max-running-requests, half of the states are for running requests.
    """
    rows = max(int(budget * _STATE_SHARE) // state_bytes - 1, 1)  # besides the padding row
    wanted = rows if args.disable_radix_cache else max(rows // 2, 1)
    running = args.max_running_requests or min(wanted, _DEFAULT_RUNNING)
    if args.disable_radix_cache:
        return running, 0
    return running, min(max(rows - running, 0), running)


def _check_states_fit(max_running: int, fitting: int) -> None:
    if fitting < 1:
        raise UserError(f"no memory is left for recurrent states; raise {_FRACTION}")
    if max_running > fitting:
        raise UserError(
            f"--max-running-requests {max_running}: memory is left for the recurrent states of {fitting} "
            f"requests; lower it, or raise {_FRACTION} on a GPU"
        )


def release_memory(runner: ModelRunner, tag: str) -> None:
    """Free the KV cache, or move the weights to host memory."""
    runner.invalidate()
    if tag == "kv_cache":
        assert runner.cache is not None
        runner.cache.free()
    elif tag == "weights" and runner.device.type == "cuda":
        _move(runner.model, torch.device("cpu"))
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()


def resume_memory(runner: ModelRunner, tag: str) -> None:
    """Undo `release_memory`."""
    if tag == "kv_cache":
        assert runner.cache is not None
        runner.cache.allocate()
    elif tag == "weights" and runner.device.type == "cuda":
        _move(runner.model, runner.device)


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Move all tensors in place: parameter objects, tied weights and shared storage are preserved."""
    moved: dict[int, torch.Tensor] = {}  # by address of their storage
    for tensor in [*model.parameters(), *model.buffers()]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in moved:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            moved[storage.data_ptr()] = whole.to(device)
        whole = moved[storage.data_ptr()].view(tensor.dtype)
        tensor.data = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
