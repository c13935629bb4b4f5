"""Steps of any Hugging Face model: attention in groups of equal shape, everything else as it is."""

from __future__ import annotations

import numpy as np
import torch

from slime.engine.cache.dense_cache import DenseCache
from slime.engine.cache.kv_cache import KVCache
from slime.engine.models.attention import use_plan
from slime.engine.models.deterministic_batch import make_fixed_batches
from slime.engine.models.fused_model import Forward
from slime.engine.models.routed_experts import RoutedExperts
from slime.engine.scheduler.batch import ForwardBatch, make_batch
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling import Draw, sample
from slime.engine.scheduler.scheduler import Scheduler, Step
from slime.engine.scheduler.scores import score
from slime.engine.scheduler.step_output import Landed, StepOutput

_FIXED_ROWS = 32  # rows of every forward in deterministic mode


class PlainRunner:
    def __init__(
        self,
        model: Forward,
        cache: KVCache,
        scheduler: Scheduler,
        deterministic: bool,
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        self._routed_experts = routed_experts
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._deterministic = deterministic
        self._dense: DenseCache | None = None
        if cache.device.type == "cpu" and not deterministic:
            self._dense = DenseCache(cache, max_tokens=cache.num_pages * cache.page_size)

    @torch.inference_mode()
    def launch(self, step: Step) -> Landed:
        """One step: compute the tokens of all works and draw the next token where one is due."""
        if self._scheduler.new_pages:
            self._cache.wipe([0, *self._scheduler.new_pages])
        works, page_table = step.works, self._scheduler.page_table
        if self._deterministic:
            batches = make_fixed_batches(works, page_table, self._cache, _FIXED_ROWS)
            return Landed(output=_join([self._forward(batch) for batch in batches]))
        batch = make_batch(works, page_table, self._cache, self._dense)
        return Landed(output=self._forward(batch))

    def forget(self) -> None:
        """The cache or the weights are about to go away."""
        if self._dense is not None:
            self._dense.clear()

    def _forward(self, batch: ForwardBatch) -> StepOutput:
        num_samples, num_scores = len(batch.sample_rows), len(batch.score_rows)
        rows = np.concatenate([batch.sample_rows, batch.score_rows])
        if self._deterministic:  # the output layer, too, sees the same number of rows every time
            rows = np.resize(rows, -(-len(rows) // _FIXED_ROWS) * _FIXED_ROWS or _FIXED_ROWS)
        with use_plan(batch.plan):
            logits = self._model(
                batch.input_ids, batch.positions, torch.from_numpy(rows).to(self._cache.device)
            )
        if self._routed_experts is not None:
            self._routed_experts.keep(batch.plan)
        requests = [work.request for work in batch.sample_works]
        draw = Draw(tokens=[], log_probs=[])
        if requests:
            draw = sample(logits[:num_samples], requests, batch.sample_positions)
        scored: list[tuple[Request, float]] = []
        if num_scores:
            positions = batch.positions.cpu().numpy()[batch.score_rows].tolist()
            owners = [work.request for work in batch.score_works]
            scored = score(logits[num_samples : num_samples + num_scores], owners, positions)
        return StepOutput(
            requests=requests, tokens=draw.tokens, log_probs=draw.log_probs, scored=scored
        )


def _join(parts: list[StepOutput]) -> StepOutput:
    return StepOutput(
        requests=[request for part in parts for request in part.requests],
        tokens=[token for part in parts for token in part.tokens],
        log_probs=[value for part in parts for value in part.log_probs],
        scored=[entry for part in parts for entry in part.scored],
    )
