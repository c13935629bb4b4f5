"""The metrics that displays and reports use, with the names of docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
LOG_PROB_GAP_MEAN = "train/log_prob_gap_mean"
STALE_GAP = "train/stale_log_prob_gap_max"
STALE_GAP_MEAN = "train/stale_log_prob_gap_mean"
STALENESS_MAX = "rollout/staleness_max"
TOKENS_PER_SECOND = "perf/rollout_tokens_per_second"
STEP_TIME = "perf/step_time"
REWARD_TIME = "perf/reward_time"  # a part of the phase `generate`
RECORD_KEYS = ("rollout_id", "kind", "time")  # of a line of metrics.jsonl; all others are metrics
_PHASE_ORDER = ("start", "generate", "train", "update_weights", "eval", "save")


def is_record(record: dict[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl has the types that a run writes: it may come from elsewhere."""
    rollout_id, kind, when = (record.get(key) for key in RECORD_KEYS)
    if type(rollout_id) is not int or not isinstance(kind, str):
        return False
    return abs(rollout_id) < 2**31 and type(when) in (int, float)


def name_stale_gap(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the log-prob gap renamed if it includes staleness.

    `train/log_prob_gap_*` compares log-probs of the same weights. For tokens of earlier weights it also
    contains the change of the updates since then, and is called `train/stale_log_prob_gap_*`.
    """
    if not metrics.get(STALENESS_MAX):
        return dict(metrics)
    renamed = {LOG_PROB_GAP: STALE_GAP, LOG_PROB_GAP_MEAN: STALE_GAP_MEAN}
    return {renamed.get(name, name): value for name, value in metrics.items()}


def eval_rewards(names: Iterable[str]) -> dict[str, str]:
    """Return the mean-reward metric of each dataset: {"gsm8k": "eval/gsm8k/reward"}."""
    found = sorted(
        name
        for name in names
        if name.startswith("eval/") and name.endswith("/reward") and not is_component(name)
    )
    return {name.removeprefix("eval/").removesuffix("/reward"): name for name in found}


def is_component(name: str) -> bool:
    """Return whether this is the mean of one component of a dictionary reward: `rollout/reward/format`."""
    return name.startswith(("rollout/reward/", "eval/")) and "/reward/" in name


def is_phase_time(name: str) -> bool:
    """Return whether this is the time of a top-level phase, such as perf/generate_time."""
    timed = name.startswith("perf/") and name.endswith("_time") and name.count("/") == 1
    return timed and name not in (STEP_TIME, REWARD_TIME)


def phase_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return {"generate": 1.2, ...} from perf/generate_time etc.: top-level phases in loop order."""
    times = {
        name.removeprefix("perf/").removesuffix("_time"): float(value)
        for name, value in metrics.items()
        if is_phase_time(name)
    }
    known = [name for name in _PHASE_ORDER if name in times]
    return {name: times[name] for name in known + sorted(set(times) - set(known))}
