"""PEFT's LoRA format for the engine: the names of the tensors in adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, in_features]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out_features, r]

Those of MoE experts are described in slime/config/peft_files.py, which also reads adapter_config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from slime.config.peft_files import (
    PEFT_PREFIX,
    WEIGHTS_FILE,
    PeftSettings,
    peft_settings,
    read_adapter_config,
)
from slime.core.errors import ConfigError
from slime.engine.scheduler.sampling_params import RequestError

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, kw_only=True)
class LoraPair:
    """The two matrices of one module."""

    a: torch.Tensor  # [r, in_features]
    b: torch.Tensor  # [out_features, r]


def tensor_name(module: str, side: str) -> str:
    """Return the name of a tensor in PEFT's file; `side` is "A" or "B"."""
    return f"{PEFT_PREFIX}{module}.lora_{side}.weight"


def parse_config(given: object, modules: Iterable[str] | None = None) -> PeftSettings:
    """Check an adapter_config.json that was already parsed as JSON, for the modules of its tensors."""
    try:
        return peft_settings(given, modules)
    except ConfigError as error:
        raise RequestError(str(error)) from None


def pair_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, LoraPair]:
    """Return the matrices by module; raise RequestError for a tensor that is not a LoRA matrix."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != 2 or not tensor.is_floating_point():
            raise RequestError(
                f"{name} {list(tensor.shape)} is not a LoRA matrix of a linear layer; this engine "
                "supports lora_A.weight and lora_B.weight only"
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    for module, found in sides.items():
        if len(found) < 2:
            missing = "B" if "A" in found else "A"
            raise RequestError(f"{tensor_name(module, missing)} is missing")
    return {module: LoraPair(a=found["A"], b=found["B"]) for module, found in sides.items()}


def read_config(folder: str | Path) -> object:
    try:
        return read_adapter_config(folder)
    except ConfigError as error:
        raise RequestError(str(error)) from None


def read_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise RequestError(
            f"{path} does not exist; this engine reads safetensors only, no pickled adapter_model.bin"
        )
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
