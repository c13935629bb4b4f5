"""What `--advantage-estimator` chooses: one line per name. A new one is a function and its line here.

| step | where |
|---|---|
| rewards within their group | group_rewards.py |
| rewards of tokens to advantages | advantages.py |
| loss of each token | pg_loss.py |
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
    """How rewards become a loss."""

    compare: Compare
    pg_loss: PgLoss = ppo_clip
    discounts: bool = False  # whether --gamma applies to what later tokens earn
    critic: bool = False  # advantages by generalised advantage estimation


RECIPES: dict[Estimator, Recipe] = {
    "grpo": Recipe(compare=scaled),
    "gspo": Recipe(compare=scaled, pg_loss=gspo),
    "cispo": Recipe(compare=scaled, pg_loss=cispo),
    "rloo": Recipe(compare=leave_one_out),
    "reinforce_plus_plus": Recipe(compare=as_they_are, discounts=True),
    "reinforce_plus_plus_baseline": Recipe(compare=centred),
    "ppo": Recipe(compare=as_they_are, discounts=True, critic=True),
}
