"""CUDA graphs of forwards with one token per row, captured for a list of batch sizes."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)
# ids (negative: the last token sampled in the row), rows, positions, rows to sample for
NUM_INPUTS = 4  # and, with adapters, the adapter slot of each row


@dataclass(kw_only=True, eq=False)
class RowOutputs:
    """The outputs of one forward, in memory that the next forward overwrites."""

    logits: torch.Tensor  # [B, V]
    tokens: torch.Tensor  # [B] int32
    log_probs: torch.Tensor  # [B] float32


RowForward = Callable[[torch.Tensor], RowOutputs]  # takes [number of inputs, B] int32


class DecodeGraphs:
    """Captures all sizes at startup. Graphs hold addresses: after `invalidate` each size is captured again
    on first use, since a rollout of short responses needs only a few."""

    def __init__(
        self,
        forward: RowForward,
        sizes: list[int],
        padding_row: int,
        device: torch.device,
        num_inputs: int = NUM_INPUTS,
    ) -> None:
        self._num_inputs = num_inputs
        self._forward = forward
        self._padding_row = padding_row
        self._sizes = sizes
        self._inputs = torch.zeros(num_inputs * sizes[-1], dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, RowOutputs]] = {}
        self._failed = False

    def padded(self, count: int) -> int:
        """Return the captured batch size that `count` rows are padded to."""
        return next(size for size in self._sizes if size >= count)

    def run(self, inputs: torch.Tensor) -> RowOutputs:
        """Replay the graph; `inputs` [number of inputs, B] int32 in pinned memory, B one of the sizes."""
        size = inputs.shape[1]
        if size not in self._graphs and not self._failed:
            self._capture(size)
        static = self._static_inputs(size)
        static.copy_(inputs, non_blocking=True)
        if self._failed:
            return self._forward(static)
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs

    def invalidate(self) -> None:
        self._graphs.clear()

    def capture_all(self) -> None:
        """Warm up and capture all sizes, the largest first so that the others reuse its memory pool."""
        start = time.perf_counter()
        gc.collect()  # frees graphs of an earlier runner and their memory
        for size in reversed(self._sizes):
            if not self._failed:
                self._warm_up(size)
                self._capture(size)
        if not self._failed:
            seconds = time.perf_counter() - start
            logger.info("captured %d CUDA graphs in %.1f s", len(self._graphs), seconds)

    def _static_inputs(self, size: int) -> torch.Tensor:
        return self._inputs[: self._num_inputs * size].view(self._num_inputs, size)

    def _warm_up(self, size: int) -> None:
        """Compile kernels and allocate workspaces, neither of which can be captured."""
        static = self._static_inputs(size)
        static.zero_()
        static[1].fill_(self._padding_row)
        static[3].fill_(self._padding_row)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._forward(static)
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self, size: int) -> None:
        pool: Any = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _garbage_collection_off(),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                outputs = self._forward(self._static_inputs(size))
        except RuntimeError as error:
            logger.warning("decoding runs without CUDA graphs: %s", str(error).splitlines()[0])
            self._graphs.clear()
            self._failed = True
            torch.cuda.synchronize()
            return
        self._graphs[size] = (graph, outputs)


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Disable garbage collection: freeing a graph while another is captured invalidates the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def graph_batch_sizes(most: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, 24, ..., 256, 288, ..., 1024, 1152, ..., and `most`."""
    sizes = [size for size in (1, 2, 4) if size < most]
    size = 8
    while size < most:
        sizes.append(size)
        size += 8 if size < 256 else 32 if size < 1024 else 128
    return [*sizes, most]
