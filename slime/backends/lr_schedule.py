"""The learning rate of each optimizer step: linear warm-up, then decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.core.errors import ConfigError

if TYPE_CHECKING:
    from slime.config.arguments import Args

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """A schedule whose `at(step)` is the learning rate of a step, counted from 0.

    Example: two warm-up steps to 1.0, then linear decay to 0.2 at step 6::

        step  0    1    2    3    4    5    6    7
        lr    0.5  1.0  1.0  0.8  0.6  0.4  0.2  0.2

    The warm-up starts above zero, so that no step is wasted. The inverse-square-root decay is
    max(min_lr, lr * sqrt(warmup / step)), and min_lr from `decay_steps` on.
    """

    lr: float
    min_lr: float = 0.0
    style: str = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0  # first step with min_lr; includes the warm-up

    def __post_init__(self) -> None:
        if self.style not in DECAY_STYLES:
            raise ValueError(f"decay style {self.style!r} is none of {', '.join(DECAY_STYLES)}")
        if self.style != "constant" and self.decay_steps < max(self.warmup_steps, 1):
            raise ValueError(f"{self.decay_steps} decay steps, {self.warmup_steps} of warm-up")

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.style == "constant":
            return self.lr
        if step >= self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        share = 1 - progress if self.style == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.min_lr + (self.lr - self.min_lr) * share


def warmup_steps(iters: int, fraction: float | None, decay_steps: int | None) -> int:
    """Return the number of warm-up steps: `iters`, or `fraction` of the decay steps if given."""
    return iters if fraction is None else round(fraction * (decay_steps or 0))


def lr_schedule(args: Args) -> LrSchedule:
    """Return the schedule of the `--lr*` flags; raise ConfigError if they contradict each other."""
    try:
        return LrSchedule(
            lr=args.lr,
            min_lr=args.min_lr,
            style=args.lr_decay_style,
            warmup_steps=warmup_steps(
                args.lr_warmup_iters, args.lr_warmup_fraction, args.lr_decay_iters
            ),
            decay_steps=args.lr_decay_iters or 0,
        )
    except ValueError as error:
        raise ConfigError(
            f"--lr-decay-style, --lr-decay-iters, --lr-warmup-iters: {error}"
        ) from None
