"""The recipes of `--advantage-estimator`. To add one, write its function and add it to `RECIPES`.

| step | where |
|---|---|
| group baseline: rewards to scores | group_rewards.py |
| token rewards to advantages | advantages.py |
| per-token policy loss | pg_loss.py |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.algorithms.group_rewards import Compare, as_they_are, centred, leave_one_out, scaled
from slime.algorithms.pg_loss import PgLoss, cispo, gspo, ppo_clip

Estimator = Literal[
    "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The functions and options with which one estimator turns rewards into a policy loss."""

    compare: Compare
    pg_loss: PgLoss = ppo_clip
    discounts: bool = False  # --gamma discounts the rewards of later tokens
    critic: bool = False  # advantages are GAE with a critic's values


RECIPES: dict[Estimator, Recipe] = {
    "grpo": Recipe(compare=scaled),
    "gspo": Recipe(compare=scaled, pg_loss=gspo),
    "cispo": Recipe(compare=scaled, pg_loss=cispo),
    "rloo": Recipe(compare=leave_one_out),
    "reinforce_plus_plus": Recipe(compare=as_they_are, discounts=True),
    "reinforce_plus_plus_baseline": Recipe(compare=centred),
    "ppo": Recipe(compare=as_they_are, discounts=True, critic=True),
}
