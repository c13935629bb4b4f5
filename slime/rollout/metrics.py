"""Progress of the rollout that is running, and metrics of rollouts and evaluations.

Metrics are computed from the samples alone. Rewards are the raw ones, before normalisation by group.
FAILED samples have no reward of their own: they count in `rollout/failed` and `rollout/samples` alone.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from slime.core.types import MAX_COMPONENTS, Group, Sample, Status
from slime.rollout.base_types import EvalResult
from slime.rollout.hook_calls import HookCalls

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 15.0
_FIRST_WARNING_S = 120.0  # without a finished sample; each further warning after twice that time


@dataclass(kw_only=True)
class Progress:
    """3 of 16 groups kept, 2 dropped, 128 samples generated with 9,000 tokens so far."""

    rollout_id: int = -1
    evaluation: bool = False
    target_groups: int = 0
    kept_groups: int = 0
    dropped_groups: int = 0
    generated_samples: int = 0
    failed_samples: int = 0
    response_tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    last_sample: float = field(default_factory=time.monotonic)
    finished: bool = True
    hook_calls: HookCalls = field(default_factory=HookCalls)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def count(self, sample: Sample) -> None:
        """Count a generated sample, whether or not its group is kept."""
        self.generated_samples += 1
        self.failed_samples += sample.status == Status.FAILED
        self.response_tokens += sample.effective_response_length
        self.last_sample = time.monotonic()


class BusyClock:
    """Sums the wall time in which at least one call is running; for the tasks of one event loop."""

    def __init__(self) -> None:
        self._running, self._since, self._seconds = 0, 0.0, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._running == 0:
            self._since = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._seconds += time.monotonic() - self._since

    def take(self) -> float:
        """Return the busy seconds since the last `take`, including calls that are still running."""
        now = time.monotonic()
        running = now - self._since if self._running else 0.0
        seconds, self._seconds, self._since = self._seconds + running, 0.0, now
        return seconds


class ProgressMonitor:
    """Holds the progress of the current rollout; may be read from any thread."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._last_logged = 0.0
        # The last sample before a stall, and the stall's length when it was last reported.
        self._warned = (0.0, 0.0)

    def start(self, progress: Progress) -> Progress:
        """Report `progress` from now on; the caller updates it."""
        self._progress, self._last_logged = progress, time.monotonic()
        return progress

    def current(self) -> Progress:
        """Return a copy of the counters."""
        return replace(self._progress)

    def log(self, progress: Progress) -> None:
        """Log these counters, at most once every 15 seconds."""
        now = time.monotonic()
        if now - self._last_logged >= _LOG_EVERY_S:
            self._last_logged = now
            logger.info(
                "rollout %d: %d of %d groups, %d dropped, %d samples, %d tokens (%.0f tok/s)",
                progress.rollout_id, progress.kept_groups, progress.target_groups,
                progress.dropped_groups, progress.generated_samples, progress.response_tokens,
                progress.response_tokens / max(progress.seconds, 1e-9),
            )  # fmt: skip

    def stall_warning(self) -> str | None:
        """Return one line for the user if no sample has finished for long, with the longest running hook."""
        progress, now = self._progress, time.monotonic()
        stalled_s = now - progress.last_sample
        last_sample, reported_s = self._warned
        if last_sample != progress.last_sample:
            last_sample, reported_s = progress.last_sample, 0.0
        if progress.finished or stalled_s < max(_FIRST_WARNING_S, 2 * reported_s):
            return None
        self._warned = last_sample, stalled_s
        kind = "evaluation" if progress.evaluation else "rollout"
        text = f"{kind} {progress.rollout_id}: no sample has been finished for {stalled_s:.0f} s"
        for call in progress.hook_calls.running()[:1]:
            text += (
                f"; {call.name} has been running for {now - call.started:.0f} s, at {call.location}"
            )
        return text


class MetricArgs(Protocol):
    reward_key: str | None
    log_passrate: bool


def rollout_metrics(args: MetricArgs, groups: list[Group]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group]
    scored = scored_samples(samples)
    metrics = {
        "rollout/samples": float(len(samples)),
        "rollout/failed": float(len(samples) - len(scored)),
        "rollout/tokens": float(sum(sample.effective_response_length for sample in scored)),
    }
    if not scored:
        return metrics
    lens = np.array([sample.response_length for sample in scored])
    by_group = [_rewards(scored_samples(group), args.reward_key) for group in groups]
    metrics |= {
        "rollout/reward_mean": float(np.mean(_rewards(scored, args.reward_key))),
        "rollout/response_len_mean": float(lens.mean()),
        "rollout/response_len_max": float(lens.max()),
        "rollout/prompt_len_mean": float(
            np.mean([len(s.tokens) - s.response_length for s in scored])
        ),
        "rollout/truncated": float(np.mean([s.status == Status.TRUNCATED for s in scored])),
        "rollout/zero_std_groups": float(sum(len(set(rewards)) == 1 for rewards in by_group)),
    }
    if any(sample.non_generation_time for sample in scored):
        times = [sample.non_generation_time for sample in scored]
        metrics["rollout/non_generation_time_mean"] = float(np.mean(times))
    others = component_means(scored) | (pass_at_k_metrics(by_group) if args.log_passrate else {})
    return metrics | {f"rollout/{name}": value for name, value in others.items()}


def dropped_metrics(dropped: Mapping[str, int]) -> dict[str, float]:
    """Return the groups that the dynamic sampling filter rejected, by reason."""
    return {f"rollout/dropped_{reason}": float(count) for reason, count in dropped.items()}


def eval_metrics(data: Mapping[str, EvalResult]) -> dict[str, float]:
    """Return `eval/<name>/reward`, `/truncated`, and with the samples `/pass@k`, `/response_len`,
    `/failed`, `/reward/<key>`."""
    return {
        f"eval/{name}/{key}": value
        for name, result in data.items()
        for key, value in _eval_metrics(result).items()
    }


def _eval_metrics(result: EvalResult) -> dict[str, float]:
    samples = result.samples or [Sample(status=Status.COMPLETED) for _ in result.rewards]
    rows = [
        (reward, truncated, sample)
        for reward, truncated, sample in zip(result.rewards, result.truncated, samples, strict=True)
        if sample.status != Status.FAILED
    ]
    metrics = {"failed": float(len(result.rewards) - len(rows))} if result.samples else {}
    if not rows:
        return metrics
    metrics["reward"] = float(np.mean([reward for reward, _, _ in rows]))
    metrics["truncated"] = float(np.mean([truncated for _, truncated, _ in rows]))
    if result.samples:
        metrics["response_len"] = float(np.mean([sample.response_length for _, _, sample in rows]))
        by_prompt: dict[int | None, list[float]] = defaultdict(list)
        for reward, _, sample in rows:
            by_prompt[sample.group_index].append(reward)
        metrics |= pass_at_k_metrics(list(by_prompt.values()))
        metrics |= component_means([sample for _, _, sample in rows])
    return metrics


def component_means(samples: list[Sample]) -> dict[str, float]:
    """Return `reward/<key>`: the mean of each component of dictionary rewards, over the samples that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.reward_components.items():
            values[name].append(value)
    return {
        f"reward/{name}": float(np.mean(values[name])) for name in list(values)[:MAX_COMPONENTS]
    }


def pass_at_k_metrics(rewards: list[list[float]]) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4, ... up to the smallest number of samples of a prompt.

    A response passes with a reward of 1 or more.
    """
    rewards = [group for group in rewards if group]
    smallest = min((len(group) for group in rewards), default=0)
    ks = [1 << power for power in range(smallest.bit_length()) if 1 << power <= smallest]
    return {
        f"pass@{k}": float(np.mean([pass_at_k(len(g), sum(r >= 1 for r in g), k) for g in rewards]))
        for k in ks
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased pass@k: the probability that k samples without replacement contain a correct one.

    1 - C(n-c, k) / C(n, k), computed as a product to avoid overflow: n=4, c=1, k=2 gives 0.5.
    """
    if num_samples - num_correct < k:
        return 1.0
    wrong = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / wrong))


def scored_samples(samples: list[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.status != Status.FAILED]


def _rewards(samples: list[Sample], reward_key: str | None) -> list[float]:
    return [sample.get_reward_value(reward_key) for sample in samples]
