"""Public import path of `slime.core.types`."""

from slime.core.types import (
    CriticColumns,
    EngineInfo,
    Group,
    LossInputs,
    LossOutput,
    MetricSum,
    ParallelInfo,
    RolloutBatch,
    Sample,
    Schedule,
    Status,
    TrainBatch,
)

__all__ = [
    "CriticColumns",
    "EngineInfo",
    "Group",
    "LossInputs",
    "LossOutput",
    "MetricSum",
    "ParallelInfo",
    "RolloutBatch",
    "Sample",
    "Schedule",
    "Status",
    "TrainBatch",
]
