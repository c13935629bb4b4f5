"""Save the samples of a rollout to a file, and load them in another run (`--load-debug-rollout-data`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from slime.core.errors import ConfigError, UserError
from slime.core.types import Group, Sample
from slime.rollout.stored_groups import plain_record


def save_debug_samples(template: str | None, rollout_id: int, samples: list[Sample]) -> None:
    """Write the samples; `template` may contain {rollout_id}."""
    if template is None:
        return
    path = Path(template.format(rollout_id=rollout_id))
    temporary = path.with_name(f".{path.name}.tmp")
    record = {"rollout_id": rollout_id, "samples": [_to_record(s) for s in samples]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(record, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # on a full disk torch raises "unexpected pos"
        free = shutil.disk_usage(path.parent).free / 2**20 if path.parent.is_dir() else 0
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"--save-debug-rollout-data: {path} cannot be written ({free:.0f} MiB are free there): {error}"
        ) from None


def load_debug_samples(template: str, rollout_id: int) -> list[Group]:
    """Return the saved samples by group."""
    path = Path(template.format(rollout_id=rollout_id))
    if not path.exists():
        raise ConfigError(f"--load-debug-rollout-data: {path} does not exist")
    record = torch.load(path, weights_only=True)
    groups: dict[int | None, Group] = {}
    for sample in map(_from_record, record["samples"]):
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def _to_record(sample: Sample) -> dict[str, Any]:
    """Return only types that `torch.load(weights_only=True)` accepts."""
    record = plain_record(sample)
    if sample.rollout_routed_experts is not None:
        record["rollout_routed_experts"] = torch.from_numpy(sample.rollout_routed_experts.copy())
    return record


def _from_record(record: dict[str, Any]) -> Sample:
    experts = record["rollout_routed_experts"]
    return Sample.from_dict(
        {**record, "rollout_routed_experts": None if experts is None else experts.numpy()}
    )
