"""The metrics that displays and reports use, with the names of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable

SAMPLES = "rollout/samples"
REWARD = "rollout/reward_mean"
RESPONSE_LEN = "rollout/response_len_mean"
RESPONSE_TOKENS = "rollout/tokens"
FAILED = "rollout/failed"
TRUNCATED = "rollout/truncated"
ZERO_STD_GROUPS = "rollout/zero_std_groups"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
ENTROPY = "train/entropy"
KL = "train/kl_loss"
CLIP_FRACTION = "train/clip_fraction"
LOG_PROB_GAP = "train/log_prob_gap_max"
TOKENS_PER_SECOND = "perf/rollout_tokens_per_second"
STEP_TIME = "perf/step_time"


def eval_rewards(names: Iterable[str]) -> dict[str, str]:
    """Return the mean-reward metric of each dataset: {"gsm8k": "eval/gsm8k/reward"}."""
    found = sorted(n for n in names if n.startswith("eval/") and n.endswith("/reward"))
    return {name.removeprefix("eval/").removesuffix("/reward"): name for name in found}
