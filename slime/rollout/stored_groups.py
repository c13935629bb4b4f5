"""Encode samples as plain data, for checkpoints and other files."""

from __future__ import annotations

import base64
import logging
from typing import Any

import numpy as np
import orjson

from slime.core.types import Group, Sample

logger = logging.getLogger(__name__)

_HOOK_FIELDS = ("metadata", "train_metadata", "reward", "multimodal_inputs")


def encode_groups(groups: list[Group]) -> list[list[dict[str, Any]]]:
    return [[_encode(sample.clone()) for sample in group] for group in groups]


def decode_groups(records: list[list[dict[str, Any]]]) -> list[Group]:
    return [[_decode(record) for record in group] for group in records]


def plain_record(sample: Sample) -> dict[str, Any]:
    """Return the fields of the sample, with values that hooks set converted to JSON."""
    record = sample.to_dict()
    for name in _HOOK_FIELDS:
        if record[name]:
            record[name] = _as_json(record[name], f"sample.{name}")
    return record


def _encode(sample: Sample) -> dict[str, Any]:
    record = plain_record(sample)
    experts = sample.rollout_routed_experts
    if experts is not None:
        record["rollout_routed_experts"] = {
            "dtype": str(experts.dtype),
            "shape": list(experts.shape),
            "data": base64.b64encode(np.ascontiguousarray(experts).tobytes()).decode(),
        }
    return record


def _as_json(value: Any, where: str) -> Any:
    """Convert to JSON data; values that are not serializable are stored as text, so that saving never fails."""

    def as_text(part: Any) -> str:
        logger.warning("%s contains a %s, which is stored as text", where, type(part).__name__)
        return repr(part)

    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.loads(orjson.dumps(value, default=as_text, option=options))


def _decode(record: dict[str, Any]) -> Sample:
    experts = record["rollout_routed_experts"]
    if experts is not None:
        flat = np.frombuffer(base64.b64decode(experts["data"]), dtype=experts["dtype"])
        record = {**record, "rollout_routed_experts": flat.reshape(experts["shape"])}
    return Sample.from_dict(record).clone()
