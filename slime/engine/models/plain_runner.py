"""The plain execution path: steps of any Hugging Face model, with attention over the paged KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from slime.engine.cache.kv_cache import KVCache
from slime.engine.models.attention import plan_attention, use_plan
from slime.engine.models.routed_experts import RoutedExperts
from slime.engine.models.step_batch import StepBatch, make_batch, split_fixed
from slime.engine.scheduler.sampling import sample, score
from slime.engine.scheduler.scheduler import Scheduler
from slime.engine.scheduler.step import FinishedStep, Step, StepOutput, join_outputs


class PlainRunner:
    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        scheduler: Scheduler,
        deterministic: bool,
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        self._model: Any = model
        self._cache = cache
        self._scheduler = scheduler
        self._deterministic = deterministic
        self._routed_experts = routed_experts

    @torch.inference_mode()
    def launch(self, step: Step) -> FinishedStep:
        """Compute all tokens of the step and sample the next token where one is due."""
        if self._scheduler.new_pages:
            self._cache.wipe([0, *self._scheduler.new_pages])
        batch = make_batch(step)
        batch.ids[: len(step.decoding)] = [request.token_ids[-1] for request in step.decoding]
        parts = split_fixed(batch, self._scheduler.padding_row) if self._deterministic else [batch]
        return FinishedStep(output=join_outputs([self._forward(part) for part in parts]))

    def invalidate(self) -> None:
        """Do nothing: no state here depends on the addresses of the weights or the cache."""

    def _forward(self, batch: StepBatch) -> StepOutput:
        device = self._cache.device
        outputs = np.concatenate([batch.sampled_at, batch.scored_at])
        # In deterministic mode the output layer, too, has the same number of rows every time.
        kept = np.arange(len(batch.ids)) if self._deterministic else outputs
        plan = plan_attention(batch, self._scheduler.page_table, self._cache)
        with use_plan(plan):
            logits = self._model(
                input_ids=torch.from_numpy(batch.ids).long().to(device).unsqueeze(0),
                position_ids=torch.from_numpy(batch.positions).long().to(device).unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.from_numpy(kept).to(device),
            ).logits[0]
        if self._deterministic:
            logits = logits[torch.from_numpy(outputs).to(device)]
        if self._routed_experts is not None:
            self._routed_experts.keep(plan)
        output = StepOutput(requests=batch.sampled, tokens=[], log_probs=[], scored=[])
        count = len(batch.sampled)
        if count:
            sampled = sample(logits[:count], batch.sampled, batch.positions[batch.sampled_at] + 1)
            output.tokens, output.log_probs = sampled.tokens, sampled.log_probs
        if batch.scored:
            positions = batch.positions[batch.scored_at].tolist()
            output.scored = score(logits[count:], batch.scored, positions)
        return output
