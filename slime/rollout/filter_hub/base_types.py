"""Public import path of `slime.rollout.base_types.DynamicFilterOutput`."""

from slime.rollout.base_types import DynamicFilterOutput

__all__ = ["DynamicFilterOutput"]
