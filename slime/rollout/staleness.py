"""How far behind the weights of each token lie when it is trained on, and what is done about it.

A response token carries the version of the weights that produced it. The rollout `rollout_id` will be
trained on by weights of version `trained_by(rollout_id)`; the difference is the token's staleness. The
synchronous loop has 0 everywhere, except for responses that `--partial-rollout` carried over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slime.core.types import Group, Sample

if TYPE_CHECKING:
    from slime.config.arguments import Args


@dataclass(kw_only=True, frozen=True)
class WeightClock:
    """The engines hold `version`, and so does the trainer when it begins on rollout `next_rollout_id`.

    version=3, next_rollout_id=2, interval=1: rollout 2 is trained on by version 3, rollout 4 by 5.
    """

    version: int
    next_rollout_id: int
    interval: int = 1  # --update-weights-interval

    def trained_by(self, rollout_id: int) -> int:
        """One update comes after every rollout r with (r + 1) divisible by the interval."""
        before = rollout_id // self.interval - self.next_rollout_id // self.interval
        return self.version + max(before, 0)


_clock: WeightClock | None = None


def set_clock(clock: WeightClock | None) -> None:
    """Called by whoever updates the engines' weights."""
    global _clock
    _clock = clock


def current_clock(rollout_id: int) -> WeightClock:
    """The clock; where nobody keeps one, weights that are new for the rollout now being made."""
    return _clock or WeightClock(version=0, next_rollout_id=rollout_id)


def trained_by(rollout_id: int) -> int | None:
    """The version that will train on the rollout; None where nobody said."""
    return None if _clock is None else _clock.trained_by(rollout_id)


def limit_staleness(args: Args, rollout_id: int, groups: list[Group]) -> dict[str, float]:
    """Take tokens that are too old out of the loss; metrics of how old all are, unless all are new.

    `--max-weight-staleness n` allows tokens of the n versions before the one that trains on them;
    `--mask-offpolicy-in-partial-rollout` none but the newest.
    """
    versions = [versions_of(sample) for group in groups for sample in group]
    known = [row for row in versions if row is not None and len(row)]
    if not known:
        return {}
    tokens = np.concatenate(known)
    newest = trained_by(rollout_id)
    newest = int(tokens.max()) if newest is None else max(newest, int(tokens.max()))
    if newest == int(tokens.min()):
        return {}
    metrics = {
        "rollout/staleness_mean": float(newest - tokens.mean()),
        "rollout/staleness_max": float(newest - tokens.min()),
    }
    oldest = oldest_allowed(args, newest, int(tokens.max()))
    if oldest is not None:
        metrics["rollout/masked_stale_tokens"] = float(
            sum(_mask_below(sample, oldest) for group in groups for sample in group)
        )
    return metrics


def is_too_old(args: Args, rollout_id: int, group: Group) -> bool:
    """Whether a response of the group has no token left that `--max-weight-staleness` allows."""
    newest = trained_by(rollout_id)
    if newest is None or args.max_weight_staleness is None:
        return False
    oldest = newest - args.max_weight_staleness
    versions = [versions_of(sample) for sample in group]
    return any(row is not None and len(row) and int(row.max()) < oldest for row in versions)


def oldest_allowed(args: Args, trained_by: int, newest_generated: int) -> int | None:
    if args.mask_offpolicy_in_partial_rollout:
        return newest_generated
    if args.max_weight_staleness is not None:
        return trained_by - args.max_weight_staleness
    return None


def versions_of(sample: Sample) -> np.ndarray | None:
    """One version per response token; None where a hook did not say, or where nothing is trained on:
    the token that stands for a response that failed comes from no weights at all."""
    if len(sample.weight_versions) != sample.response_length:
        return None
    if sample.loss_mask is not None and not any(sample.loss_mask):
        return None
    return np.asarray(sample.weight_versions)


def _mask_below(sample: Sample, oldest: int) -> int:
    """Mask the sample's tokens of versions before `oldest`; how many were trained on before."""
    versions = versions_of(sample)
    if versions is None or not (versions < oldest).any():
        return 0
    mask = np.ones(len(versions), int) if sample.loss_mask is None else np.array(sample.loss_mask)
    masked = int(mask[versions < oldest].sum())
    mask[versions < oldest] = 0
    sample.loss_mask = mask.tolist()
    return masked
