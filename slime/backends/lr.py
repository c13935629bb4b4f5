"""The learning rate schedule that the flags describe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.backends.lr_schedule import LrSchedule, warmup_steps
from slime.core.errors import ConfigError

if TYPE_CHECKING:
    from slime.config.arguments import Args


def lr_schedule(args: Args) -> LrSchedule:
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
