"""Steps of the fast forward on a GPU, launched without waiting for any of them.

    decoding requests ──▶ CUDA graph of one token per row ──┐
                                                            ├─▶ copies to pinned memory, an event
    pieces of prompts ──▶ one forward over tiles ───────────┘

Tokens drawn stay on the device: the next step reads them there, by row of the page table. In
deterministic mode every token is a row, in graphs of one size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.cache.kv_cache import KVCache
from slime.engine.kernels.cuda_kernels import TILE
from slime.engine.kernels.interface import Tokens
from slime.engine.models.decode_graphs import NUM_INPUTS, DecodeGraphs, RowOutputs, ladder
from slime.engine.models.fast_model import FastModel
from slime.engine.models.sample_tokens import draw_all, draw_special, make_settings, note_settings
from slime.engine.models.step_batch import (
    FIXED_ROWS,
    LAST_SAMPLED,
    StepBatch,
    make_batch,
    make_span_batch,
    split_fixed,
)
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.scheduler import Scheduler, Step
from slime.engine.scheduler.scores import score
from slime.engine.scheduler.step_output import StepOutput


class CudaRunner:
    def __init__(
        self,
        model: FastModel,
        cache: KVCache,
        scheduler: Scheduler,
        deterministic: bool,
    ) -> None:
        self._model = model
        self._kernels = model.kernels
        self._cache = cache
        self._scheduler = scheduler
        self._deterministic = deterministic
        device = cache.device
        table = scheduler.page_table
        self._table = torch.from_numpy(table).to(device)
        self._settings = make_settings(len(table), device)
        sizes = [FIXED_ROWS] if deterministic else ladder(len(table) - 1)
        with torch.inference_mode():
            self._graphs = DecodeGraphs(self._forward_rows, sizes, scheduler.scrap_row, device)
            self._graphs.record_all()

    @torch.inference_mode()
    def launch(self, step: Step) -> CudaFlight:
        self._send_pages()
        starting = [piece.request for piece in step.pieces if piece.samples]
        if starting:
            note_settings(self._settings, starting)
        flight = CudaFlight()
        if self._deterministic:
            self._run_fixed(make_batch(step), flight)
        else:
            if step.decoding:
                self._decode(step, flight)
            if step.guesses:
                self._verify(make_span_batch(step.guesses), flight)
            if step.pieces:
                self._prefill(make_span_batch(step.pieces), flight)
        flight.take_off()
        return flight

    def forget(self) -> None:
        """The cache or the weights are about to go away: graphs hold their addresses."""
        self._graphs.forget()

    def _decode(self, step: Step, flight: CudaFlight) -> None:
        count = len(step.decoding)
        order = np.argsort(-step.positions, kind="stable")  # the longest first: none ends alone
        requests, positions = [step.decoding[i] for i in order], step.positions[order]
        inputs = self._rows_input(self._graphs.padded(count))
        inputs[0, :count] = LAST_SAMPLED
        inputs[1, :count] = inputs[3, :count] = step.rows[order]
        inputs[2, :count] = positions
        outputs = self._graphs.run(_pinned(inputs))
        special = draw_special(
            outputs.logits,
            requests,
            outputs.tokens,
            outputs.log_probs,
            self._settings,
            positions,
        )
        flight.add(requests, outputs.tokens[:count], outputs.log_probs[:count], special)

    def _verify(self, batch: StepBatch, flight: CudaFlight) -> None:
        """Newest tokens and drafts, a row each: every one of them has a token drawn after it."""
        most = len(self._scheduler.page_table) - 1
        for first in range(0, len(batch.ids), most):
            part = slice(first, first + most)
            requests, positions = batch.sampled[part], batch.positions[part]
            count = len(requests)
            inputs = self._rows_input(self._graphs.padded(count))
            inputs[0, :count] = batch.ids[part]
            inputs[1, :count] = inputs[3, :count] = batch.rows[part]
            inputs[2, :count] = positions
            outputs = self._graphs.run(_pinned(inputs))
            tokens, log_probs = outputs.tokens[:count], outputs.log_probs[:count]
            special = draw_special(
                outputs.logits, requests, tokens, log_probs, self._settings, positions
            )
            flight.add(requests, tokens, log_probs, special)

    def _prefill(self, batch: StepBatch, flight: CudaFlight) -> None:
        tiles = _tiles(batch.counts)
        outputs = np.concatenate([batch.sampled_at, batch.scored_at])
        sent = _upload(
            self._cache.device,
            batch.ids,
            batch.positions,
            batch.rows,
            tiles.reshape(-1),
            outputs,
            batch.positions[outputs],
            batch.rows[outputs],
        )
        ids, positions, rows, tile_table, outputs, at, of = sent
        tokens = Tokens(ids=ids, positions=positions, rows=rows, tiles=tile_table.view(-1, 2))
        if not len(outputs):  # a piece from the middle of a prompt; only its keys and values matter
            outputs = outputs.new_zeros(1)
        logits = self._model(tokens, self._cache, self._table, outputs)
        count = len(batch.sampled)
        if count:
            drawn = draw_all(
                self._kernels,
                logits[:count],
                batch.sampled,
                of[:count],
                at[:count],
                self._settings,
                batch.positions[batch.sampled_at],
            )
            flight.add(batch.sampled, *drawn)
        if batch.scored:
            positions = batch.positions[batch.scored_at].tolist()
            flight.scored += score(logits[count:], batch.scored, positions)

    def _run_fixed(self, batch: StepBatch, flight: CudaFlight) -> None:
        """Run the step in the fixed-size forwards of deterministic mode."""
        for part in split_fixed(batch, self._scheduler.scrap_row):
            inputs = self._rows_input(FIXED_ROWS)
            inputs[:3] = part.ids, part.rows, part.positions
            inputs[3, part.sampled_at] = part.rows[part.sampled_at]
            outputs = self._graphs.run(_pinned(inputs))
            if part.sampled:
                self._take_drawn(outputs, part, flight)
            if part.scored:
                at = torch.from_numpy(part.scored_at).to(self._cache.device)
                positions = part.positions[part.scored_at].tolist()
                flight.scored += score(outputs.logits[at], part.scored, positions)

    def _take_drawn(self, outputs: RowOutputs, part: StepBatch, flight: CudaFlight) -> None:
        index = torch.from_numpy(part.sampled_at).to(self._cache.device)
        logits, tokens, log_probs = (
            x[index] for x in (outputs.logits, outputs.tokens, outputs.log_probs)
        )
        positions = part.positions[part.sampled_at]
        special = draw_special(logits, part.sampled, tokens, log_probs, self._settings, positions)
        flight.add(part.sampled, tokens, log_probs, special)

    def _forward_rows(self, inputs: torch.Tensor) -> RowOutputs:
        ids, rows, positions, draw_rows = inputs
        ids = torch.where(ids < 0, self._settings.last_tokens.index_select(0, rows), ids)
        tokens = Tokens(ids=ids, positions=positions, rows=rows)
        logits = self._model(tokens, self._cache, self._table)
        drawn, log_probs = self._kernels.draw(logits, draw_rows, positions, self._settings)
        return RowOutputs(logits=logits, tokens=drawn, log_probs=log_probs)

    def _rows_input(self, size: int) -> np.ndarray:
        """Nothing but padding: token 0 at position 0 of the scrap row."""
        inputs = np.zeros((NUM_INPUTS, size), np.int32)
        inputs[1] = inputs[3] = self._scheduler.scrap_row
        return inputs

    def _send_pages(self) -> None:
        writes = self._scheduler.page_writes
        if not writes:
            return
        width = self._table.shape[1]
        pages = {  # the later of two writes to one place
            row * width + first + i: page
            for row, first, new in writes
            for i, page in enumerate(new)
        }
        if not pages:
            return
        both = np.array([list(pages.keys()), list(pages.values())], np.int64)
        sent = _pinned(both).to(self._cache.device, non_blocking=True)
        self._table.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))


class CudaFlight:
    """Results on their way to pinned memory."""

    def __init__(self) -> None:
        self.immediate = False
        self.scored: list[tuple[Request, float]] = []
        self._parts: list[_Part] = []
        self._event = torch.cuda.Event()

    def add(
        self,
        requests: list[Request],
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        special: bool,
    ) -> None:
        self._parts.append(
            _Part(requests=requests, tokens=_to_host(tokens), log_probs=_to_host(log_probs))
        )
        self.immediate = self.immediate or special

    def take_off(self) -> None:
        self._event.record()

    def collect(self) -> StepOutput:
        self._event.synchronize()
        output = StepOutput(requests=[], tokens=[], log_probs=[], scored=self.scored)
        for part in self._parts:
            output.requests += part.requests
            output.tokens += part.tokens.tolist()
            output.log_probs += part.log_probs.tolist()
        return output


@dataclass(kw_only=True, eq=False)
class _Part:
    requests: list[Request]
    tokens: torch.Tensor
    log_probs: torch.Tensor


def _tiles(counts: list[int]) -> np.ndarray:
    """[N, 2] first token and number of tokens of runs of at most TILE tokens, the last pieces of each
    prompt first: they have the most to look at."""
    tiles: list[tuple[int, int]] = []
    first = 0
    for count in counts:
        tiles += [(first + i, min(TILE, count - i)) for i in range(0, count, TILE)][::-1]
        first += count
    return np.array(tiles, np.int32)


def _upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """All of them in one copy."""
    joined = np.concatenate([array.astype(np.int32, copy=False) for array in arrays])
    sent = _pinned(joined).to(device, non_blocking=True)
    return list(sent.split([len(array) for array in arrays]))


def _pinned(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
