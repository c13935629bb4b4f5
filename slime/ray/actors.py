"""The classes that run as Ray actors, by functions that import them.

Each function is called in the actor's process only: importing torch and transformers in the driver as
well would cost it, and a small machine that starts all processes at once, several seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.backends.base import TrainRayActor
    from slime.ray.engine_actor import EngineActor
    from slime.ray.rollout import RolloutManager


def rollout_manager() -> type[RolloutManager]:
    from slime.ray.rollout import RolloutManager

    return RolloutManager


def engine_actor() -> type[EngineActor]:
    from slime.ray.engine_actor import EngineActor

    return EngineActor


def trainer(backend: str) -> Callable[[], type[TrainRayActor]]:
    """Return the function that imports the trainer of `--train-backend`."""
    return {"fsdp": fsdp_trainer, "megatron": megatron_trainer}[backend]


def fsdp_trainer() -> type[TrainRayActor]:
    from slime.backends.fsdp_utils.actor import FSDPTrainRayActor

    return FSDPTrainRayActor


def megatron_trainer() -> type[TrainRayActor]:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    return MegatronTrainRayActor
