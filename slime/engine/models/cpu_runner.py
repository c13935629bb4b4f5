"""Steps of the fast forward on a CPU: everything of a step in one forward."""

from __future__ import annotations

import numpy as np
import torch

from slime.engine.cache.kv_cache import KVCache
from slime.engine.kernels.cpu_kernels import CpuKernels
from slime.engine.kernels.interface import Tokens
from slime.engine.models.fast_model import FastModel
from slime.engine.models.sample_tokens import (
    barred_ends,
    draw_special,
    make_settings,
    note_settings,
)
from slime.engine.models.step_layout import Layout, lay_out
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.scheduler import Scheduler, Step
from slime.engine.scheduler.scores import score
from slime.engine.scheduler.step_output import Landed, StepOutput

_FIXED_ROWS = 32  # tokens of every forward in deterministic mode


class CpuRunner:
    def __init__(
        self,
        model: FastModel,
        kernels: CpuKernels,
        cache: KVCache,
        scheduler: Scheduler,
        deterministic: bool,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._table = torch.from_numpy(scheduler.page_table)  # the same memory
        self._settings = make_settings(len(scheduler.page_table), cache.device)
        self._scrap_row = scheduler.scrap_row
        self._deterministic = deterministic

    @torch.inference_mode()
    def launch(self, step: Step) -> Landed:
        layout = lay_out(step.guesses + step.pieces)
        starting = [piece.request for piece in step.pieces if piece.samples]
        if starting:
            note_settings(self._settings, starting)
        num_decoding = len(step.decoding)
        rows = torch.from_numpy(np.concatenate([step.rows.astype(np.int32), layout.rows]))
        positions = torch.from_numpy(
            np.concatenate([step.positions.astype(np.int32), layout.positions])
        )
        ids = torch.from_numpy(layout.ids)
        if num_decoding:
            newest = self._settings.last_tokens.index_select(0, rows[:num_decoding])
            ids = torch.cat([newest, ids]) if len(ids) else newest
        tokens = Tokens(ids=ids, positions=positions, rows=rows)
        outputs = None
        if len(layout.ids):
            at = [layout.drawn_at + num_decoding, layout.scored_at + num_decoding]
            outputs = torch.from_numpy(np.concatenate([np.arange(num_decoding), *at]))
        logits = self._forward(tokens, outputs)
        requests = step.decoding + layout.drawn if layout.drawn else step.decoding
        if outputs is not None:
            rows, positions = rows[outputs], positions[outputs]
        return Landed(output=self._output(logits, requests, rows, positions, layout))

    def forget(self) -> None:
        """The cache or the weights are about to go away; nothing here depends on them."""

    def _output(
        self,
        logits: torch.Tensor,
        requests: list[Request],
        rows: torch.Tensor,
        positions: torch.Tensor,
        layout: Layout,
    ) -> StepOutput:
        """`logits` are of the tokens drawn, then of those scored."""
        count = len(requests)
        output = StepOutput(requests=requests, tokens=[], log_probs=[], scored=[])
        if count:
            logits_drawn, places = logits[:count], positions[:count]
            tokens, log_probs = self._kernels.draw(
                logits_drawn,
                rows[:count],
                places,
                self._settings,
                barred_ends(requests, places.tolist()),
            )
            draw_special(
                logits_drawn,
                requests,
                tokens,
                log_probs,
                self._settings,
                places.numpy(),
                ends_barred=True,
            )
            output.tokens, output.log_probs = tokens.tolist(), log_probs.tolist()
        if layout.scored:
            output.scored = score(logits[count:], layout.scored, positions[count:].tolist())
        return output

    def _forward(self, tokens: Tokens, outputs: torch.Tensor | None) -> torch.Tensor:
        if not self._deterministic:
            return self._model(tokens, self._cache, self._table, outputs)
        total = len(tokens.ids)
        # Padding of the last forward stands at position 0 of the scrap row.
        size = -(-total // _FIXED_ROWS) * _FIXED_ROWS
        ids, positions, rows = torch.zeros(3, size, dtype=torch.int32)
        rows.fill_(self._scrap_row)
        ids[:total], positions[:total], rows[:total] = tokens.ids, tokens.positions, tokens.rows
        parts = [
            self._model(Tokens(ids=i, positions=p, rows=r), self._cache, self._table)
            for i, p, r in zip(*(x.split(_FIXED_ROWS) for x in (ids, positions, rows)), strict=True)
        ]
        logits = torch.cat(parts)
        return logits[:total] if outputs is None else logits[outputs]
