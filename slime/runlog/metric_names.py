"""The metrics that displays and reports use, with the names of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
_PHASE_ORDER = ("start", "generate", "train", "update_weights", "eval", "save")


def eval_rewards(names: Iterable[str]) -> dict[str, str]:
    """Return the mean-reward metric of each dataset: {"gsm8k": "eval/gsm8k/reward"}."""
    found = sorted(n for n in names if n.startswith("eval/") and n.endswith("/reward"))
    return {name.removeprefix("eval/").removesuffix("/reward"): name for name in found}


def phase_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return {"generate": 1.2, ...} from perf/generate_time etc.: top-level phases in loop order."""
    times = {
        name.removeprefix("perf/").removesuffix("_time"): float(value)
        for name, value in metrics.items()
        if name.startswith("perf/") and name.endswith("_time") and name != STEP_TIME
    }
    times = {name: seconds for name, seconds in times.items() if "/" not in name}
    known = [name for name in _PHASE_ORDER if name in times]
    return {name: times[name] for name in known + sorted(set(times) - set(known))}
