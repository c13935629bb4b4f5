"""Rollouts on disk: written by one run, trained on by another, exactly as they were."""

from __future__ import annotations

from pathlib import Path

import torch

from slime.utils.errors import ConfigError
from slime.utils.types import Sample


def save_debug_samples(template: str | None, rollout_id: int, samples: list[Sample]) -> None:
    """`template` may hold {rollout_id}."""
    if template is None:
        return
    path = Path(template.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": [s.to_dict() for s in samples]}, path)


def load_debug_samples(template: str, rollout_id: int) -> list[list[Sample]]:
    path = Path(template.format(rollout_id=rollout_id))
    if not path.exists():
        raise ConfigError(f"--load-debug-rollout-data: {path} does not exist")
    record = torch.load(path, weights_only=True)
    groups: dict[int | None, list[Sample]] = {}
    for sample in map(Sample.from_dict, record["samples"]):
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())
