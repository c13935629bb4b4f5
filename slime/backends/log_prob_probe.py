"""A fixed token sequence to which trainer and engines assign equal log-probs if weights are equal.

SGLang's checksums are computed in its own weight layout and cannot always be predicted; the probe
detects a missing, swapped or stale weight in any layout.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from slime.core.types import Probe, RolloutBatch, Schedule

if TYPE_CHECKING:
    from slime.backends.base import TrainRayActor

_LENGTH = 9
_TEXT = "The capital of France is Paris, and two plus two is four."


def score_probe(actor: TrainRayActor) -> Probe:
    """Score the probe with the actor; a collective call with an equal result on every rank."""
    tokens = probe_tokens(actor.args.hf_checkpoint)
    batch = _batch(tokens, copies=actor.parallel.pp_size)  # one micro-batch per pipeline stage
    column = actor.log_probs(batch, model="actor")[0]
    return Probe(
        tokens=tuple(tokens),
        log_probs=tuple(float(value) for value in column),
        temperature=actor.args.rollout_temperature,
        tolerance=0.002 if actor.args.precision == "fp32" else 0.5,
    )


def probe_tokens(hf_checkpoint: str) -> list[int]:
    """Return the tokens of a plain sentence; random ones, used without a tokenizer, have log-probs
    below -20, which bf16 resolves only to about 1 or 2."""
    config = json.loads((Path(hf_checkpoint) / "config.json").read_text())
    vocab_size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    tokenizer = Path(hf_checkpoint) / "tokenizer.json"
    if tokenizer.exists():
        tokens = Tokenizer.from_file(str(tokenizer)).encode(_TEXT).ids[:_LENGTH]
        if len(tokens) == _LENGTH and max(tokens) < vocab_size:
            return tokens
    return [random.Random(position).randrange(vocab_size) for position in range(_LENGTH)]


def _batch(tokens: list[int], *, copies: int) -> RolloutBatch:
    response = len(tokens) - 1
    weights = np.full(response, 1 / response)
    micro_batches = [[row] for row in range(copies)]
    return RolloutBatch(
        tokens=[np.asarray(tokens)] * copies,
        response_lens=np.full(copies, response),
        loss_masks=[np.ones(response)] * copies,
        rewards=np.zeros(copies),
        raw_rewards=np.zeros(copies),
        truncated=np.zeros(copies),
        group_indices=np.arange(copies),
        sample_indices=np.arange(copies),
        rollout_ids=np.arange(copies),
        loss_weights=[weights] * copies,
        schedule=Schedule(steps=[micro_batches], log_prob_micro_batches=micro_batches),
    )
