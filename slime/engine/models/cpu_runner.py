"""Steps of the fast forward on a CPU: all tokens of a step in one forward."""

from __future__ import annotations

import numpy as np
import torch

from slime.engine.kernels.cpu_kernels import CpuKernels
from slime.engine.kernels.interface import Tokens
from slime.engine.kernels.lora import group_rows
from slime.engine.kv_cache import KVCache
from slime.engine.models.delta_net import plan_states
from slime.engine.models.fast_model import FastModel
from slime.engine.models.vision_tower import VisionTower
from slime.engine.scheduler.sampling import (
    forbidden_ends,
    make_sampling_state,
    sample_special,
    score,
    set_sampling_state,
)
from slime.engine.scheduler.scheduler import Scheduler
from slime.engine.scheduler.step import (
    FinishedStep,
    Step,
    StepBatch,
    StepOutput,
    join_outputs,
    make_batch,
    split_fixed,
)


class CpuRunner:
    def __init__(
        self,
        model: FastModel,
        cache: KVCache,
        scheduler: Scheduler,
        deterministic: bool,
        tower: VisionTower | None = None,
    ) -> None:
        assert isinstance(model.kernels, CpuKernels)
        self._model = model
        self._tower = tower
        self._kernels = model.kernels
        self._cache = cache
        self._table = torch.from_numpy(scheduler.page_table)  # shares its memory
        self._sampling = make_sampling_state(len(scheduler.page_table), cache.device)
        self._scheduler = scheduler
        self._deterministic = deterministic

    @torch.inference_mode()
    def launch(self, step: Step) -> FinishedStep:
        set_sampling_state(self._sampling, step)
        if self._cache.states is not None and self._scheduler.states is not None:
            self._cache.states.copy(self._scheduler.states.copies)
        batch = make_batch(step)
        parts = split_fixed(batch, self._scheduler.padding_row) if self._deterministic else [batch]
        return FinishedStep(output=join_outputs([self._forward(part) for part in parts]))

    def invalidate(self) -> None:
        """Do nothing: no state here depends on the addresses of the weights or the cache."""

    def _forward(self, batch: StepBatch) -> StepOutput:
        ids, rows, positions = map(torch.from_numpy, (batch.ids, batch.rows, batch.positions))
        ids = torch.where(ids < 0, self._sampling.last_tokens.index_select(0, rows), ids)
        slots = self._scheduler.row_slots[batch.rows]
        adapters = group_rows(slots, self._cache.device, fixed=self._deterministic)
        tokens = Tokens(ids=ids, positions=positions, rows=rows, adapters=adapters)
        if batch.rope is not None and self._tower is not None:
            tokens.rope = torch.from_numpy(batch.rope).long()
            tokens.images = self._tower.inputs(batch.images)
        if self._cache.states is not None:
            row, fixed = self._scheduler.padding_row, self._deterministic
            tokens.states = plan_states(batch, self._cache.states, row, fixed=fixed)
        if len(batch.sampled) == len(ids):  # a token is sampled after each of them
            logits = self._model(tokens, self._cache, self._table)
            return self._output(logits, batch, rows, positions)
        outputs = torch.from_numpy(np.concatenate([batch.sampled_at, batch.scored_at]))
        if self._deterministic:  # the output layer, too, has the same number of rows every time
            logits = self._model(tokens, self._cache, self._table)[outputs]
        else:
            logits = self._model(tokens, self._cache, self._table, outputs)
        return self._output(logits, batch, rows[outputs], positions[outputs])

    def _output(
        self, logits: torch.Tensor, batch: StepBatch, rows: torch.Tensor, positions: torch.Tensor
    ) -> StepOutput:
        """Sample from the first rows of `logits`, and take prompt log-probs from the others."""
        requests, count = batch.sampled, len(batch.sampled)
        output = StepOutput(requests=requests, tokens=[], log_probs=[], scored=[])
        if count:
            sampled_logits, at = logits[:count], positions[:count]
            forbidden = forbidden_ends(requests, at.tolist())
            tokens, log_probs = self._kernels.sample(
                sampled_logits, rows[:count], at, self._sampling, forbidden
            )
            sample_special(
                sampled_logits,
                requests,
                tokens,
                log_probs,
                self._sampling,
                at.numpy(),
                ends_forbidden=True,
            )
            output.tokens, output.log_probs = tokens.tolist(), log_probs.tolist()
        if batch.scored:
            output.scored = score(logits[count:], batch.scored, positions[count:].tolist())
        return output
