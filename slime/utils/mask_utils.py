"""Public import path of `slime.compat.loss_masks`."""

from slime.compat.loss_masks import MultiTurnLossMaskGenerator

__all__ = ["MultiTurnLossMaskGenerator"]
