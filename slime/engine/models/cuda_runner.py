"""Steps of the fast forward on a GPU, launched asynchronously.

    decoding requests ──▶ CUDA graph of one token per row ──┐
                                                            ├─▶ copies to pinned memory, an event
    prefill chunks ─────▶ one forward over tiles ───────────┘

Sampled tokens stay on the device: the next step reads them there, by row of the page table. In deterministic
mode every token is a row, in CUDA graphs of one batch size.
"""

from __future__ import annotations

import numpy as np
import torch

from slime.algorithms.delta_kernels import choose_kernels
from slime.engine.kernels.cuda_kernels import TILE
from slime.engine.kernels.interface import AdapterRows, Tokens
from slime.engine.kv_cache import KVCache
from slime.engine.models.decode_graphs import (
    NUM_INPUTS,
    DecodeGraphs,
    RowOutputs,
    graph_batch_sizes,
)
from slime.engine.models.delta_net import plan_states
from slime.engine.models.fast_model import FastModel
from slime.engine.models.vision_tower import VisionTower
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling import (
    make_sampling_state,
    sample_special,
    score,
    set_sampling_state,
)
from slime.engine.scheduler.scheduler import Scheduler
from slime.engine.scheduler.step import (
    FIXED_ROWS,
    LAST_SAMPLED,
    Step,
    StepBatch,
    StepOutput,
    make_batch,
    make_span_batch,
    split_fixed,
)


class CudaRunner:
    def __init__(
        self,
        model: FastModel,
        cache: KVCache,
        scheduler: Scheduler,
        deterministic: bool,
        with_lora: bool = False,
        tower: VisionTower | None = None,
    ) -> None:
        self._model = model
        self._tower = tower
        self._kernels = model.kernels
        self._cache = cache
        self._scheduler = scheduler
        self._deterministic = deterministic
        device = cache.device
        table = scheduler.page_table
        self._table = torch.from_numpy(table).to(device)
        self._sampling = make_sampling_state(len(table), device)
        # By row: RoPE position minus index of later tokens. None: always 0 (no images).
        self._deltas = None
        if tower is not None:
            self._deltas = torch.zeros(len(table), dtype=torch.int32, device=device)
        sizes = [FIXED_ROWS] if deterministic else graph_batch_sizes(scheduler.max_running)
        if cache.states is not None and not deterministic:
            # Compile and tune the prefill kernels now instead of during the first request.
            choose_kernels(cache.states.windows, cache.states.shape.heads, backward=False)
        with torch.inference_mode():
            options = (self._forward_rows, sizes, scheduler.padding_row, device)
            self._graphs = DecodeGraphs(*options)
            self._graphs.capture_all()
            self._lora_graphs = DecodeGraphs(*options, NUM_INPUTS + 1) if with_lora else None
            if self._lora_graphs is not None:
                self._lora_graphs.capture_all()

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingCudaStep:
        self._send_pages()
        if self._cache.states is not None and self._scheduler.states is not None:
            self._cache.states.copy(self._scheduler.states.copies)
        set_sampling_state(self._sampling, step)
        if self._deltas is not None and step.prefill:
            # For every chunk: deterministic mode reads it before the last chunk of a prompt.
            pairs = [[span.request.row, span.request.rope_delta] for span in step.prefill]
            rows, deltas = _upload(self._cache.device, *np.array(pairs, np.int32).T)
            self._deltas.index_copy_(0, rows.long(), deltas)
        pending = PendingCudaStep()
        if self._deterministic:
            self._run_fixed(make_batch(step), pending)
        else:
            if step.decoding:
                self._decode(step, pending)
            if step.drafts:
                self._verify(make_span_batch(step.drafts), pending)
            if step.prefill:
                self._prefill(make_span_batch(step.prefill), pending)
        pending.record()
        return pending

    def invalidate(self) -> None:
        """Drop the CUDA graphs, which hold the addresses of the weights and the cache."""
        self._graphs.invalidate()
        if self._lora_graphs is not None:
            self._lora_graphs.invalidate()

    def _decode(self, step: Step, pending: PendingCudaStep) -> None:
        # The longest sequences first, so that the last wave of programs has short ones.
        order = np.argsort(-step.positions, kind="stable")
        requests = [step.decoding[i] for i in order]
        ids = np.full(len(requests), LAST_SAMPLED, np.int32)
        self._sample_rows(ids, step.rows[order], step.positions[order], requests, pending)

    def _verify(self, batch: StepBatch, pending: PendingCudaStep) -> None:
        """Compute newest and draft tokens, one per row; a token is sampled after each of them."""
        most = self._scheduler.max_running
        for first in range(0, len(batch.ids), most):
            part = slice(first, first + most)
            arrays = (batch.ids[part], batch.rows[part], batch.positions[part])
            self._sample_rows(*arrays, batch.sampled[part], pending)

    def _sample_rows(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        requests: list[Request],
        pending: PendingCudaStep,
    ) -> None:
        """Compute one token per row in a CUDA graph, and sample the token after each."""
        count = len(requests)
        inputs = self._rows_input(self._graphs.padded(count))
        inputs[0, :count] = ids
        inputs[1, :count] = inputs[3, :count] = rows
        inputs[2, :count] = positions
        outputs = self._run_rows(inputs)
        sampled = outputs.tokens[:count], outputs.log_probs[:count]
        self._add_sampled(outputs.logits, *sampled, requests, positions, pending)

    def _prefill(self, batch: StepBatch, pending: PendingCudaStep) -> None:
        tiles = _tiles(batch.counts)
        outputs = np.concatenate([batch.sampled_at, batch.scored_at])
        slots = self._scheduler.row_slots[batch.rows]
        sent = _upload(
            self._cache.device,
            batch.ids,
            batch.positions,
            batch.rows,
            tiles.reshape(-1),
            outputs,
            batch.positions[outputs],
            batch.rows[outputs],
            slots,
        )
        ids, positions, rows, tile_table, outputs, at, of, sent_slots = sent
        tokens = Tokens(ids=ids, positions=positions, rows=rows, tiles=tile_table.view(-1, 2))
        self._add_images(tokens, batch)
        if self._cache.states is not None:
            row = self._scheduler.padding_row
            tokens.states = plan_states(batch, self._cache.states, row, fixed=False)
        if slots.max() >= 0:
            tokens.adapters = AdapterRows(slots=sent_slots)
        if not len(outputs):  # only chunks from the middle of prompts: no logits needed
            outputs = outputs.new_zeros(1)
        logits = self._model(tokens, self._cache, self._table, outputs)
        count = len(batch.sampled)
        if count:
            sampled_logits, where = logits[:count], batch.positions[batch.sampled_at]
            sampled = self._kernels.sample(sampled_logits, of[:count], at[:count], self._sampling)
            self._add_sampled(sampled_logits, *sampled, batch.sampled, where, pending)
        if batch.scored:
            positions = batch.positions[batch.scored_at].tolist()
            pending.scored += score(logits[count:], batch.scored, positions)

    def _add_images(self, tokens: Tokens, batch: StepBatch) -> None:
        if batch.rope is not None and self._tower is not None:
            (rope,) = _upload(self._cache.device, batch.rope.reshape(-1))
            tokens.rope = rope.view(-1, 3).long()
            tokens.images = self._tower.inputs(batch.images)

    def _run_fixed(self, batch: StepBatch, pending: PendingCudaStep) -> None:
        """Run the step in the fixed-size forwards of deterministic mode."""
        for part in split_fixed(batch, self._scheduler.padding_row):
            inputs = self._rows_input(FIXED_ROWS)
            inputs[:3] = part.ids, part.rows, part.positions
            inputs[3, part.sampled_at] = part.rows[part.sampled_at]
            if part.rope is None:
                outputs = self._run_rows(inputs)
            else:
                outputs = self._forward_images(inputs, part)
            if part.sampled:
                at = torch.from_numpy(part.sampled_at).to(self._cache.device)
                logits, tokens = outputs.logits[at], outputs.tokens[at]
                log_probs, where = outputs.log_probs[at], part.positions[part.sampled_at]
                self._add_sampled(logits, tokens, log_probs, part.sampled, where, pending)
            if part.scored:
                at = torch.from_numpy(part.scored_at).to(self._cache.device)
                positions = part.positions[part.scored_at].tolist()
                pending.scored += score(outputs.logits[at], part.scored, positions)

    def _add_sampled(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        requests: list[Request],
        positions: np.ndarray,
        pending: PendingCudaStep,
    ) -> None:
        """Add the tokens that the kernel sampled, resampled for requests with special parameters."""
        special = sample_special(logits, requests, tokens, log_probs, self._sampling, positions)
        pending.add(requests, tokens, log_probs, special)

    def _run_rows(self, inputs: np.ndarray) -> RowOutputs:
        """Replay the graph without adapters, unless one of the rows has an adapter.

        Deterministic mode always uses the graph with adapters, as its base rows may use other kernels.
        """
        slots = self._scheduler.row_slots[inputs[1]]
        if self._lora_graphs is None or (slots.max() < 0 and not self._deterministic):
            return self._graphs.run(_pinned(inputs))
        return self._lora_graphs.run(_pinned(np.concatenate([inputs, slots[None]])))

    def _forward_images(self, inputs: np.ndarray, batch: StepBatch) -> RowOutputs:
        """Run rows of deterministic mode without a graph, with the same kernels and shapes."""
        if self._lora_graphs is not None:
            inputs = np.concatenate([inputs, self._scheduler.row_slots[inputs[1]][None]])
        return self._forward_rows(_pinned(inputs).to(self._cache.device), batch)

    def _forward_rows(self, inputs: torch.Tensor, batch: StepBatch | None = None) -> RowOutputs:
        """Compute one token per row; `batch` has the images of a forward that is not in a graph."""
        ids, rows, positions, sample_rows = inputs[:NUM_INPUTS]
        adapters = AdapterRows(slots=inputs[NUM_INPUTS]) if len(inputs) > NUM_INPUTS else None
        ids = torch.where(ids < 0, self._sampling.last_tokens.index_select(0, rows), ids)
        tokens = Tokens(ids=ids, positions=positions, rows=rows, adapters=adapters)
        if batch is not None:
            self._add_images(tokens, batch)
        elif self._deltas is not None:
            tokens.angles = positions + self._deltas.index_select(0, rows)
        logits = self._model(tokens, self._cache, self._table)
        sampled, log_probs = self._kernels.sample(logits, sample_rows, positions, self._sampling)
        return RowOutputs(logits=logits, tokens=sampled, log_probs=log_probs)

    def _rows_input(self, size: int) -> np.ndarray:
        """Return inputs that are all padding: token 0 at position 0 of the padding row."""
        inputs = np.zeros((NUM_INPUTS, size), np.int32)
        inputs[1] = inputs[3] = self._scheduler.padding_row
        return inputs

    def _send_pages(self) -> None:
        width = self._table.shape[1]
        pages = {  # the last write to each place wins
            row * width + first + i: page
            for row, first, new in self._scheduler.page_writes
            for i, page in enumerate(new)
        }
        if not pages:
            return
        both = np.array([list(pages.keys()), list(pages.values())], np.int64)
        sent = _pinned(both).to(self._cache.device, non_blocking=True)
        self._table.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))


class PendingCudaStep:
    """A launched step whose results are being copied to pinned memory."""

    def __init__(self) -> None:
        self.blocks_next_step = False
        self.scored: list[tuple[Request, float]] = []
        # Requests, and the token and log-prob of each.
        self._parts: list[tuple[list[Request], torch.Tensor, torch.Tensor]] = []
        self._event = torch.cuda.Event()

    def add(
        self,
        requests: list[Request],
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        special: bool,
    ) -> None:
        self._parts.append((requests, _to_host(tokens), _to_host(log_probs)))
        self.blocks_next_step = self.blocks_next_step or special

    def record(self) -> None:
        self._event.record()

    def wait(self) -> StepOutput:
        self._event.synchronize()
        output = StepOutput(requests=[], tokens=[], log_probs=[], scored=self.scored)
        for requests, tokens, log_probs in self._parts:
            output.requests += requests
            output.tokens += tokens.tolist()
            output.log_probs += log_probs.tolist()
        return output


def _tiles(counts: list[int]) -> np.ndarray:
    """Return [N, 2], first token and count of each tile of at most TILE queries; the last tiles of a prompt
    come first, since they attend to the most positions."""
    tiles: list[tuple[int, int]] = []
    first = 0
    for count in counts:
        tiles += [(first + i, min(TILE, count - i)) for i in range(0, count, TILE)][::-1]
        first += count
    return np.array(tiles, np.int32)


def _upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copy all arrays to the device in one transfer."""
    joined = np.concatenate([array.astype(np.int32, copy=False) for array in arrays])
    sent = _pinned(joined).to(device, non_blocking=True)
    return list(sent.split([len(array) for array in arrays]))


def _pinned(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
