"""Samples and training rows as plain data: in checkpoints, and in the files of three debugging flags.

`--save-debug-rollout-data` writes the samples of a rollout, which `--load-debug-rollout-data` reads in
another run; `--save-debug-train-data` writes the rows that a rank trained on.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import shutil
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime.core.errors import ConfigError, UserError
from slime.core.types import Group, RolloutBatch, Sample
from slime.data.images import content_hash

logger = logging.getLogger(__name__)

_HOOK_FIELDS = ("messages", "metadata", "train_metadata", "reward", "multimodal_inputs")
_FIELDS = {field.name for field in fields(Sample)}
_IMAGES = "_images"  # in the first record of a group: its images by hash
# Column -> its key in files, which must not change between versions.
_KEYS = {"num_trajectories": "executions", "trajectory_ids": "rollout_ids"}


def encode_groups(groups: list[Group]) -> list[list[dict[str, Any]]]:
    """Return the groups as JSON data, for checkpoints."""
    return [_encode_group(group) for group in groups]


def decode_groups(records: list[list[dict[str, Any]]]) -> list[Group]:
    return [_decode_group(group) for group in records]


def _encode_group(group: Group) -> list[dict[str, Any]]:
    """Return a record per sample; the first one holds the images of all, each once."""
    records = [_encode(sample.clone()) for sample in group]
    files = _image_files(group)
    if files:
        records[0][_IMAGES] = {key: base64.b64encode(file).decode() for key, file in files.items()}
    return records


def _decode_group(records: list[dict[str, Any]]) -> Group:
    stored = records[0].get(_IMAGES) or {} if records else {}
    files = {key: base64.b64decode(file) for key, file in stored.items()}
    return [_with_images(_decode(record), files) for record in records]


def _image_files(samples: list[Sample]) -> dict[str, bytes]:
    """Return the distinct images of the samples by their hashes, which replace them in records."""
    return {content_hash(file): file for sample in samples for file in sample.image_files}


def _with_images(sample: Sample, files: dict[str, bytes]) -> Sample:
    if sample.multimodal_inputs is not None and sample.image_files:
        sample.multimodal_inputs["images"] = [files[str(key)] for key in sample.image_files]
    return sample


def save_debug_samples(template: str | None, rollout_id: int, samples: list[Sample]) -> None:
    """Write the samples; `template` may contain {rollout_id}."""
    if template is None:
        return
    import torch

    records = [_plain_record(sample) for sample in samples]
    for record, sample in zip(records, samples, strict=True):
        if sample.rollout_routed_experts is not None:
            experts = torch.from_numpy(sample.rollout_routed_experts.copy())
            record["rollout_routed_experts"] = experts
    path = Path(template.format(rollout_id=rollout_id))
    files = _image_files(samples)
    images = {
        key: torch.frombuffer(bytearray(file), dtype=torch.uint8) for key, file in files.items()
    }
    content = {
        "rollout_id": rollout_id,
        "samples": records,
        **({"images": images} if files else {}),
    }
    _save(path, content, "--save-debug-rollout-data")


def load_debug_samples(template: str, rollout_id: int) -> list[Group]:
    """Return the saved samples by group."""
    import torch

    path = Path(template.format(rollout_id=rollout_id))
    if not path.exists():
        raise ConfigError(f"--load-debug-rollout-data: {path} does not exist")
    try:
        content = torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"--load-debug-rollout-data: {path} holds more than tensors and plain data, and loading it "
            f"could run code: {str(error).splitlines()[0]}"
        ) from None
    groups: dict[int | None, Group] = {}
    files = {key: bytes(file.numpy()) for key, file in content.get("images", {}).items()}
    for record in content["samples"]:
        experts = record.get("rollout_routed_experts")
        if experts is not None:
            record["rollout_routed_experts"] = experts.numpy()
        sample = _with_images(Sample.from_dict(record), files)
        sample.weight_versions = _per_token(sample.weight_versions, sample.response_length)
        groups.setdefault(sample.group_index, []).append(sample)
    return list(groups.values())


def _per_token(versions: list[Any], count: int) -> list[int]:
    """Return the weight version of each token; files of other versions of slime hold one per request."""
    numbers = [int(v) if str(v).isdecimal() else 0 for v in versions]
    if len(numbers) == count or not numbers:
        return numbers
    return numbers[:1] * count if len(set(numbers)) == 1 else []


def save_train_data(template: str | None, rollout_id: int, rank: int, batch: RolloutBatch) -> None:
    """Write one file per rank; `{rollout_id}` and `{rank}` in the template are replaced.

    The file is a dictionary for `torch.load(path, weights_only=True)`: a tensor per column of one number
    per row, a list of tensors per column of one number per token, and the schedule of the steps.
    """
    if template is None:
        return
    import torch

    record: dict[str, object] = {"rollout_id": rollout_id, "rank": rank}
    for column in fields(batch):
        value, key = getattr(batch, column.name), _KEYS.get(column.name, column.name)
        if isinstance(value, np.ndarray):
            record[key] = torch.from_numpy(value.copy())
        elif isinstance(value, list) and value and isinstance(value[0], np.ndarray):
            record[key] = [torch.from_numpy(row.copy()) for row in value]
    if batch.schedule is not None:
        record["steps"] = batch.schedule.steps
    path = Path(template.format(rollout_id=rollout_id, rank=rank))
    _save(path, record, "--save-debug-train-data")


def _save(path: Path, record: dict[str, Any], flag: str) -> None:
    """Write a file for `torch.load(path, weights_only=True)`, whole or not at all."""
    import torch

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(record, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # on a full disk torch raises "unexpected pos"
        free = shutil.disk_usage(path.parent).free / 2**20 if path.parent.is_dir() else 0
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"{flag}: {path} cannot be written ({free:.0f} MiB are free there): {error}"
        ) from None


def _plain_record(sample: Sample) -> dict[str, Any]:
    """Return the fields of the sample, with values that hooks set converted to JSON."""
    record = sample.to_dict()
    if sample.image_files:
        keys = [content_hash(file) for file in sample.image_files]
        record["multimodal_inputs"] = {**record["multimodal_inputs"], "images": keys}
    for name in _HOOK_FIELDS:
        if record[name]:
            record[name] = _as_json(record[name], f"sample.{name}")
    for name in record.keys() - _FIELDS:  # attributes that hooks added: keep only JSON values
        if not _is_json(record[name]):
            del record[name]
    return record


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _as_json(value: Any, where: str) -> Any:
    """Convert to JSON data; values of types that it does not have are stored as text."""

    def as_text(part: Any) -> str:
        logger.warning("%s contains a %s, which is stored as text", where, type(part).__name__)
        return repr(part)

    def as_plain(part: Any) -> Any:
        return part.tolist() if isinstance(part, np.ndarray | np.generic) else as_text(part)

    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    with suppress(TypeError):  # integers above 64 bits, lone surrogates, cycles
        return orjson.loads(orjson.dumps(value, default=as_text, option=options))
    with suppress(TypeError, ValueError, RecursionError):  # cycles, keys of other types
        return json.loads(json.dumps(value, default=as_plain))
    if isinstance(value, dict):  # readers of metadata rely on its type
        return {str(key): part if _is_json(part) else as_text(part) for key, part in value.items()}
    return as_text(value)


def _encode(sample: Sample) -> dict[str, Any]:
    record = _plain_record(sample)
    experts = sample.rollout_routed_experts
    if experts is not None:
        record["rollout_routed_experts"] = {
            "dtype": str(experts.dtype),
            "shape": list(experts.shape),
            "data": base64.b64encode(np.ascontiguousarray(experts).tobytes()).decode(),
        }
    return record


def _decode(record: dict[str, Any]) -> Sample:
    experts = record["rollout_routed_experts"]
    if experts is not None:
        flat = np.frombuffer(base64.b64decode(experts["data"]), dtype=experts["dtype"])
        record = {**record, "rollout_routed_experts": flat.reshape(experts["shape"])}
    return Sample.from_dict(record).clone()
