"""Why does the reward not rise? Checks of a run's metrics and samples, each with samples as evidence.

A check compares the latest `WINDOW` rollouts with the limits in its function. Metrics that the
run does not log are not checked. The live page's server, the report and the run's own
warnings (`LearningWarnings` in `slime/runlog/recorder.py`) call them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from slime.runlog import metric_names as names
from slime.runlog.format import number, score
from slime.runlog.live.metric_store import MetricStore
from slime.runlog.live.sample_store import SampleStore, without_signal
from slime.runlog.sample_table import STATUSES, is_train

WINDOW = 10  # latest rollouts that a check looks at
_MAX_ROWS = 200_000  # latest rows of the table that a check reads
_WITHOUT_GROUPS = ("ppo", "reinforce_plus_plus")  # estimators that compare no samples of a group
_STALE = "rollout/staleness_mean"


@dataclass(kw_only=True, frozen=True)
class Finding:
    """`level` is "problem", "notice" or "fine"; `query` selects the samples or groups behind it in `view`."""

    level: str
    title: str
    text: str
    metrics: list[str] = field(default_factory=list)
    view: str = ""  # "samples" or "groups"
    query: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, frozen=True)
class Evidence:
    metrics: MetricStore
    samples: SampleStore
    config: dict[str, Any]

    def recent(self, name: str) -> np.ndarray:
        """Return the finite values of the latest rollouts."""
        values = self.metrics.values(name)[-WINDOW:]
        return values[np.isfinite(values)]

    def mean(self, name: str) -> float | None:
        values = self.recent(name)
        return float(values.mean()) if len(values) else None

    def first(self, name: str) -> float | None:
        values = self.metrics.values(name)[:WINDOW]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None

    @property
    def since(self) -> int:
        """The first of the latest rollouts."""
        series = self.metrics.series.get(names.REWARD)
        return int(series.rollouts[-WINDOW:][0]) if series is not None else 0


def findings(
    metrics: MetricStore, samples: SampleStore, config: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return all findings, problems first."""
    evidence = Evidence(metrics=metrics, samples=samples, config=config)
    found = [finding for check in CHECKS for finding in [check(evidence)] if finding is not None]
    order = {"problem": 0, "notice": 1, "fine": 2}
    return [asdict(finding) for finding in sorted(found, key=lambda f: order[f.level])]


def _level(value: float, notice: float, problem: float) -> str:
    """Return the level of a value whose limits are `notice` and `problem`."""
    return "problem" if value >= problem else "notice" if value >= notice else "fine"


def _train_since(rollout_id: int) -> dict[str, str]:
    """Return the query for the training samples, or groups, of this rollout and later ones."""
    return {"dataset": "train", "rollout_id_min": str(rollout_id)}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def reward_trend(e: Evidence) -> Finding | None:
    values = e.metrics.values(names.REWARD)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return None
    part = min(WINDOW, len(values) // 2)
    first, last = values[:part], values[-part:]
    change = float(last.mean() - first.mean())
    noise = float(np.hypot(first.std(), last.std()) / np.sqrt(part)) if part > 1 else 0.0
    rises = change > 2 * noise and change > 0
    verb = "rises" if rises else "falls" if -change > 2 * noise and change < 0 else "does not move"
    text = (
        f"Mean of the first {part} rollouts {score(first.mean())}, of the last {score(last.mean())}"
    )
    text += f" (noise of the difference {number(noise)})." if part > 1 else "."
    level = "fine" if rises else "problem" if len(values) >= 2 * WINDOW else "notice"
    return Finding(level=level, title=f"The reward {verb}", text=text, metrics=[names.REWARD])


def equal_groups(e: Evidence) -> Finding | None:
    groups = e.samples.latest_groups(e.since)
    train = [n for n, name in enumerate(e.samples.datasets) if is_train(name)]
    recent = groups[np.isin(groups["dataset"], train) & (groups["size"] > 1)]
    if not len(recent):
        return None
    scored = recent[np.isfinite(recent["high"])]
    if len(scored) and scored["low"].min() == scored["high"].max():
        return _constant_reward(e, scored)
    if e.config.get("advantage_estimator") in _WITHOUT_GROUPS:
        return None
    equal = recent[without_signal(recent)]
    share = len(equal) / len(recent)
    level = _level(share, 0.4, 0.75)
    text = f"{len(equal)} of {len(recent)} groups since rollout {e.since} have equal rewards"
    best = np.zeros(0, bool)
    if len(equal):
        top = float(recent["high"][np.isfinite(recent["high"])].max(initial=-np.inf))
        best = equal["mean"] >= top
        text += f" ({best.sum()} at the highest reward, {score(top)}; {(~best).sum()} below it)"
    text += ". Their advantages are 0, so their rewards add no gradient."
    if level != "fine" and best.mean() > 0.5:
        level = "notice"  # these prompts are solved
        text += " Most prompts are solved: harder ones would teach more."
    elif level != "fine":
        text += " Most are too hard for the model: easier prompts, a warm-up, or more samples per prompt."
    if level != "fine":
        text += " --dynamic-sampling-filter-path drops such groups and samples others."
    return Finding(
        level=level,
        title=f"{_percent(share)} of the groups give no signal",
        text=text,
        metrics=[names.ZERO_STD_GROUPS],
        view="groups",
        query={"signal": "none", **_train_since(e.since)},
    )


def _constant_reward(e: Evidence, groups: np.ndarray) -> Finding:
    reward = score(float(groups["high"].max()))
    return Finding(
        level="problem",
        title="All rewards are equal",
        text=f"Each of {groups['size'].sum()} samples since rollout {e.since} has the reward {reward}, so nothing can "
        "be learned. Read some samples: the reward may not find the answer, or all prompts are too hard or solved.",
        metrics=[names.ZERO_STD_GROUPS, names.REWARD],
        view="samples",
        query=_train_since(e.since),
    )


def repeated_prompts(e: Evidence) -> Finding | None:
    if "train" not in e.samples.datasets or not len(e.samples.rows):
        return None
    rows = e.samples.rows[-_MAX_ROWS:]
    rows = rows[rows["dataset"] == e.samples.datasets.index("train")]
    rows = rows[rows["rollout_id"] == rows["rollout_id"].max(initial=-1)]
    groups, prompts = (len(np.unique(rows[name])) for name in ("group", "prompt"))
    if prompts >= groups:
        return None
    return Finding(
        level="notice",
        title="Prompts repeat within a rollout",
        text=f"The {groups} groups of rollout {rows['rollout_id'][0]} have {prompts} different prompts: the data has "
        "duplicates, or fewer rows than --rollout-batch-size.",
        view="groups",
        query=_train_since(rows["rollout_id"][0]),
    )


def truncated(e: Evidence) -> Finding | None:
    share = e.mean(names.TRUNCATED)
    if share is None:
        return None
    limit = e.config.get("rollout_max_response_len")
    text = f"{_percent(share)} of the responses since rollout {e.since} reached the length limit"
    text += f" (--rollout-max-response-len {limit})." if limit else "."
    rewards = _rewards_by_status(e, "truncated")
    if rewards is not None:
        text += f" Mean reward of these {score(rewards[0])}, of the others {score(rewards[1])}."
    return Finding(
        level=_level(share, 0.1, 0.3),
        title=f"{_percent(share)} of the responses are truncated",
        text=text,
        metrics=[names.TRUNCATED, names.RESPONSE_LEN],
        view="samples",
        query={"status": "truncated", **_train_since(e.since)},
    )


def _rewards_by_status(e: Evidence, status: str) -> tuple[float, float] | None:
    rows = e.samples.rows[-_MAX_ROWS:]
    rows = rows[(rows["rollout_id"] >= e.since) & np.isfinite(rows["reward"])]
    with_it = rows["status"] == STATUSES.index(status)
    if not with_it.any() or with_it.all():
        return None
    return float(rows["reward"][with_it].mean()), float(rows["reward"][~with_it].mean())


def failed(e: Evidence) -> Finding | None:
    failures, samples = e.recent(names.FAILED), e.recent(names.SAMPLES)
    if not len(failures) or not samples.sum():
        return None
    share = float(failures.sum() / samples.sum())
    text = f"{failures.sum():.0f} of {samples.sum():.0f} samples since rollout {e.since} failed in "
    text += "generation or reward and do not count."
    if share and (reason := _latest_error(e.samples)):
        text += f" The latest error: {reason}"
    return Finding(
        level=_level(share, 1e-9, 0.05),
        title=f"{_percent(share)} of the samples failed" if share else "No sample failed",
        text=text,
        metrics=[names.FAILED],
        view="samples",
        query={"status": "failed", "rollout_id_min": str(e.since)},
    )


def _latest_error(samples: SampleStore) -> str | None:
    rows = samples.rows
    with_text = np.flatnonzero((rows["status"] == STATUSES.index("failed")) & (rows["text"] >= 0))
    for row in with_text[::-1][:20].tolist():
        text = samples.text(row)
        if text is not None and text.error:
            return text.error.splitlines()[0][:300]
    return None


def clipped(e: Evidence) -> Finding | None:
    share = e.mean(names.CLIP_FRACTION)
    if share is None:
        return None
    text = (
        f"The clip limits the ratio of {_percent(share)} of the tokens since rollout {e.since}; "
        "except with CISPO these have no gradient."
    )
    if share >= 0.2:
        text += " The policy moves far within one rollout: fewer optimizer steps per rollout, or a lower --lr."
    return Finding(
        level=_level(share, 0.1, 0.3),
        title=f"{_percent(share)} of the tokens are clipped",
        text=text,
        metrics=[names.CLIP_FRACTION, "train/ppo_kl"],
    )


def log_prob_gap(e: Evidence) -> Finding | None:
    gap = e.mean(names.LOG_PROB_GAP_MEAN)
    if gap is None:
        return None
    text = (
        f"Engine and trainer differ by {number(gap)} per token on average since rollout {e.since}."
        " Rounding explains about 1e-6 in fp32 and 1e-2 in bf16."
    )
    return Finding(
        level=_level(gap, 0.03, 0.1),
        title=f"The log-prob gap is {number(gap)}",
        text=text,
        metrics=[names.LOG_PROB_GAP_MEAN, names.LOG_PROB_GAP],
    )


def stale_gap(e: Evidence) -> Finding | None:
    gap, stale = e.mean(names.STALE_GAP_MEAN), e.mean(_STALE)
    if gap is None or not stale:
        return None
    text = (
        f"Tokens are {number(stale)} weight updates old on average since rollout {e.since}; the trainer's "
        f"log-probs of them differ by {number(gap)} from those at their generation."
    )
    return Finding(
        level=_level(gap, 0.5, 2.0),
        title=f"Staleness changes log-probs by {number(gap)}",
        text=text,
        metrics=[names.STALE_GAP_MEAN, _STALE],
    )


def entropy(e: Evidence) -> Finding | None:
    first, last = e.first(names.ENTROPY), e.mean(names.ENTROPY)
    if first is None or last is None or len(e.metrics.values(names.ENTROPY)) < 2:
        return None
    collapsed = last < 0.005 or (first > 0 and last < 0.1 * first)
    text = f"Entropy per token went from {number(first)} to {number(last)} nats."
    if collapsed:
        text += " The policy samples nearly the same response each time, so groups become equal: "
        text += "a lower --lr, a higher --rollout-temperature, --eps-clip-high or --entropy-coef."
    rises = not collapsed and last > 3 * first and last > 1
    if rises:
        text += " It grows: responses become random, often after steps that are too large."
    level = "problem" if collapsed else "notice" if rises else "fine"
    title = "Entropy collapsed" if collapsed else "Entropy grows" if rises else "Entropy is alive"
    return Finding(level=level, title=title, text=text, metrics=[names.ENTROPY])


def gradient(e: Evidence) -> Finding | None:
    values = e.metrics.values(names.GRAD_NORM)[-WINDOW:]
    if not len(values):
        return None
    broken = int((~np.isfinite(values)).sum())
    finite = values[np.isfinite(values)]
    if broken:
        title, level = "The gradient is not a number", "problem"
        text = (
            f"{broken} of the last {len(values)} rollouts have a gradient that is NaN or infinite."
        )
    elif not finite.any():
        title, level = "The gradient is zero", "problem"
        text = f"All of the last {len(values)} rollouts have gradient norm 0: nothing is learned."
    else:
        title, level = "Gradients are finite and not zero", "fine"
        text = f"Gradient norm {number(float(finite.mean()))} on average since rollout {e.since}."
    return Finding(level=level, title=title, text=text, metrics=[names.GRAD_NORM])


def learning_rate(e: Evidence) -> Finding | None:
    first, last = e.first("train/lr"), e.metrics.last("train/lr")
    if first is None or last is None:
        return None
    tiny = last == 0 or last < 0.01 * first
    text = f"Learning rate {number(first)} at first, {number(last)} now."
    if tiny:
        text += " It has decayed to nearly nothing: --lr-decay-style constant, or more rollouts."
    return Finding(
        level="notice" if tiny else "fine",
        title="The learning rate is nearly zero" if tiny else "The learning rate is not zero",
        text=text,
        metrics=["train/lr"],
    )


def staleness(e: Evidence) -> Finding | None:
    stale = e.mean(_STALE)
    if stale is None:
        return None
    text = f"Tokens are {number(stale)} weight updates old on average when they are trained on."
    masked, tokens = e.mean("rollout/masked_stale_tokens"), e.mean(names.RESPONSE_TOKENS)
    if masked and tokens:
        text += f" {_percent(masked / tokens)} of them are too old and do not count."
    return Finding(
        level=_level(stale, 2, 6),
        title=f"Staleness is {number(stale)}",
        text=text,
        metrics=[_STALE, "rollout/staleness_max"],
    )


def length(e: Evidence) -> Finding | None:
    first, last = e.first(names.RESPONSE_LEN), e.mean(names.RESPONSE_LEN)
    if not first or last is None or len(e.metrics.values(names.RESPONSE_LEN)) < 2 * WINDOW:
        return None
    ratio = last / first
    moved = ratio > 3 or ratio < 1 / 3
    text = f"Mean response length went from {number(first)} to {number(last)} tokens."
    if moved:
        text += (
            " Read some samples: a length that runs away often means that the reward is exploited."
        )
    return Finding(
        level="notice" if moved else "fine",
        title=f"Responses became {'longer' if ratio > 1 else 'shorter'}"
        if moved
        else "Length is steady",
        text=text,
        metrics=[names.RESPONSE_LEN],
        view="samples",
        query={**_train_since(e.since), "sort": "response_len", "order": "down"},
    )


CHECKS: tuple[Callable[[Evidence], Finding | None], ...] = (
    reward_trend,
    equal_groups,
    repeated_prompts,
    failed,
    truncated,
    gradient,
    entropy,
    clipped,
    log_prob_gap,
    stale_gap,
    staleness,
    learning_rate,
    length,
)
