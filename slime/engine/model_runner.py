"""Runs forwards of scheduled work through the Hugging Face model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.arguments import EngineArgs
from slime.engine.attention import record_layers, use_plan
from slime.engine.batch import ForwardBatch, make_batch
from slime.engine.dense_cache import DenseCache
from slime.engine.fixed_batch import make_fixed_batches
from slime.engine.fused_model import make_forward
from slime.engine.kv_cache import KVCache, LayerShape
from slime.engine.loading import context_len, load_model
from slime.engine.request import Request
from slime.engine.sampling import Draw, sample
from slime.engine.scheduler import Work
from slime.utils.device import device_type
from slime.utils.errors import UserError

_FIXED_ROWS = 32  # rows of every forward in deterministic mode
_SCORE_ROWS = 512  # prompt log-probs computed at a time


@dataclass(kw_only=True, eq=False)
class StepOutput:
    """The tokens drawn in one step, row i for `works[i]`, and the log-probs of prompt tokens."""

    works: list[Work]
    draw: Draw
    scored: list[tuple[Request, float]]


class ModelRunner:
    """The model on its device. `layers` says what each layer stores in the KV cache."""

    def __init__(self, args: EngineArgs) -> None:
        self.device = torch.device(args.device or device_type())
        self.model = load_model(args, self.device)
        self.dtype: torch.dtype = self.model.dtype
        self.deterministic = args.enable_deterministic_inference
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.context_len = context_len(args, self.model)
        self._model = make_forward(self.model)
        self.layers = self._find_layers()
        self.cache: KVCache | None = None
        self.dense: DenseCache | None = None

    def make_cache(self, num_pages: int, page_size: int) -> None:
        self.cache = KVCache(self.layers, num_pages, page_size, self.dtype, self.device)
        if self.device.type == "cpu" and not self.deterministic:
            self.dense = DenseCache(self.cache, max_tokens=num_pages * page_size)

    @torch.inference_mode()
    def run(self, works: list[Work], page_table: np.ndarray) -> StepOutput:
        """One step: compute the tokens of all works and draw the next token where one is due."""
        assert self.cache is not None
        if self.deterministic:
            parts = [
                self._forward(b)
                for b in make_fixed_batches(works, page_table, self.cache, _FIXED_ROWS)
            ]
            return _join(parts)
        return self._forward(make_batch(works, page_table, self.cache, self.dense))

    def _forward(self, batch: ForwardBatch) -> StepOutput:
        num_samples, num_scores = len(batch.sample_rows), len(batch.score_rows)
        rows = np.concatenate([batch.sample_rows, batch.score_rows])
        if self.deterministic:  # the output layer, too, sees the same number of rows every time
            rows = np.resize(rows, -(-len(rows) // _FIXED_ROWS) * _FIXED_ROWS or _FIXED_ROWS)
        with use_plan(batch.plan):
            logits = self._model(
                batch.input_ids, batch.positions, torch.from_numpy(rows).to(self.device)
            )
        requests = [work.request for work in batch.sample_works]
        draw = sample(logits[:num_samples], requests) if requests else Draw(tokens=[], log_probs=[])
        scored = (
            self._score(logits[num_samples : num_samples + num_scores], batch) if num_scores else []
        )
        return StepOutput(works=batch.sample_works, draw=draw, scored=scored)

    def _score(self, logits: torch.Tensor, batch: ForwardBatch) -> list[tuple[Request, float]]:
        positions = batch.positions.cpu().numpy()[batch.score_rows].tolist()
        owners = [work.request for work in batch.score_works]
        targets = [r.token_ids[p + 1] for r, p in zip(owners, positions, strict=True)]
        values: list[float] = []
        for start in range(0, len(targets), _SCORE_ROWS):
            part = logits[start : start + _SCORE_ROWS].float()
            index = torch.tensor(
                targets[start : start + _SCORE_ROWS], device=part.device
            ).unsqueeze(1)
            values += torch.log_softmax(part, dim=-1).gather(1, index).squeeze(1).tolist()
        return list(zip(owners, values, strict=True))

    @torch.inference_mode()
    def _find_layers(self) -> dict[int, LayerShape]:
        """Run one token with attention that only takes notes: works for any model definition."""
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        with record_layers() as layers:
            self._model(token, token, token)
        if not layers:
            raise UserError(
                f"the embedded engine cannot serve {type(self.model).__name__}: its attention does not "
                "go through transformers' attention interface; use --rollout-engine sglang"
            )
        return layers


def _join(parts: list[StepOutput]) -> StepOutput:
    return StepOutput(
        works=[work for part in parts for work in part.works],
        draw=Draw(
            tokens=[token for part in parts for token in part.draw.tokens],
            log_probs=[value for part in parts for value in part.draw.log_probs],
        ),
        scored=[entry for part in parts for entry in part.scored],
    )
