"""`--save-debug-train-data`: write the rows that a rank trained on, with everything computed for them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np

from slime.core.types import RolloutBatch

_KEYS = {"num_trajectories": "executions"}  # the key in files of all versions


def save_train_data(template: str | None, rollout_id: int, rank: int, batch: RolloutBatch) -> None:
    """Write one file per rank; `{rollout_id}` and `{rank}` in the template are replaced.

    A dictionary of columns for `torch.load(path, weights_only=True)`: a tensor where there is one number
    per row, a list of tensors where there is one per token, and the schedule of the steps.
    """
    if template is None:
        return
    import torch

    path = Path(template.format(rollout_id=rollout_id, rank=rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, object] = {"rollout_id": rollout_id, "rank": rank}
    for column in fields(batch):
        value, key = getattr(batch, column.name), _KEYS.get(column.name, column.name)
        if isinstance(value, np.ndarray):
            record[key] = torch.from_numpy(value.copy())
        elif isinstance(value, list) and value and isinstance(value[0], np.ndarray):
            record[key] = [torch.from_numpy(row.copy()) for row in value]
    if batch.schedule is not None:
        record["steps"] = batch.schedule.steps
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(record, temporary)
    temporary.replace(path)
