"""Random rows for tests of the pure parts."""

from __future__ import annotations

import numpy as np

from slime.core.dp_schedule import loss_weights, trajectories_per_step
from slime.core.types import RolloutBatch

VOCAB_SIZE = 50


def random_batch(
    num_rows: int,
    *,
    seed: int = 0,
    max_len: int = 9,
    rows_per_trajectory: int = 1,
    group_size: int = 3,
    global_batch_size: int = 10**6,
    per_token: bool = False,
    **columns: object,
) -> RolloutBatch:
    """Rows of 2..2*max_len tokens with some tokens masked out and every log-prob column filled."""
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(1, max_len + 1, num_rows)
    response_lens = rng.integers(1, max_len + 1, num_rows)
    trajectory_ids = 100 - np.arange(num_rows) // rows_per_trajectory  # any ids, not ascending
    masks = [(rng.random(n) < 0.8).astype(np.int8) for n in response_lens]

    def log_probs() -> list[np.ndarray]:
        return [-3 * rng.random(n) for n in response_lens]

    values: dict = {
        "tokens": [
            rng.integers(1, VOCAB_SIZE, p + r)
            for p, r in zip(prompt_lens, response_lens, strict=True)
        ],
        "response_lens": response_lens,
        "loss_masks": masks,
        "rewards": rng.normal(size=num_rows),
        "raw_rewards": rng.random(num_rows),
        "truncated": np.zeros(num_rows),
        "group_indices": np.arange(num_rows) // group_size,
        "sample_indices": np.arange(num_rows),
        "trajectory_ids": trajectory_ids,
        "num_trajectories": trajectories_per_step(trajectory_ids, global_batch_size),
        "old_log_probs": log_probs(),
        "ref_log_probs": log_probs(),
        "rollout_log_probs": log_probs(),
        "advantages": [rng.normal(size=n) for n in response_lens],
        "loss_weights": loss_weights(
            masks, trajectory_ids, global_batch_size=global_batch_size, per_token=per_token
        ),
        **columns,
    }
    return RolloutBatch(**values)
