"""PEFT's LoRA format: adapter_config.json, and the names of the tensors in adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [r, in_features]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out_features, r]

Those of MoE experts are described in slime/config/peft_files.py.
A setting that changes what an adapter computes is either honoured or refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from slime.engine.scheduler.sampling_params import RequestError

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_LARGEST_CONFIG = 1 << 20  # bytes
# Settings of training, of loading or of documentation: they do not change what a trained adapter computes.
_WITHOUT_EFFECT = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size"),
    *("ensure_weight_tying", "runtime_config", "eva_config", "lora_ga_config"),
}
_HONOURED = {
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "bias"),
    *("layers_to_transform", "layers_pattern", "init_lora_weights", "target_parameters"),
}
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """An adapter adds scale * B(A(x)): r 8, alpha 16 give 2, and with rsLoRA 16 / sqrt(8)."""

    rank: int
    alpha: float
    scale: float
    targets: tuple[str, ...] = ()  # names every matching module of the model must be given for
    parameters: tuple[str, ...] = ()  # of experts


@dataclass(frozen=True, kw_only=True)
class LoraPair:
    """The two matrices of one module."""

    a: torch.Tensor  # [r, in_features]
    b: torch.Tensor  # [out_features, r]


def tensor_name(module: str, side: str) -> str:
    """Return the name of a tensor in PEFT's file; `side` is "A" or "B"."""
    return f"{_PREFIX}{module}.lora_{side}.weight"


def parse_config(given: Any) -> LoraConfig:
    """Check an adapter_config.json that was already parsed as JSON."""
    if not isinstance(given, dict):
        raise RequestError(f"{CONFIG_FILE} must be a JSON object")
    if given.get("peft_type") != "LORA":
        raise RequestError(f"peft_type must be LORA, got {given.get('peft_type')!r}")
    _refuse_unsupported(given)
    rank, alpha = given.get("r"), given.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise RequestError(f"r must be an integer above 0, got {rank!r}")
    if not isinstance(alpha, (int, float)) or not abs(alpha) < 1e9:  # not NaN, no huge integer
        raise RequestError(f"lora_alpha must be a number, got {alpha!r}")
    rslora = given.get("use_rslora")
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    parameters = _names(given, "target_parameters")
    targets = (*_targets(given), *parameters)
    return LoraConfig(rank=rank, alpha=alpha, scale=scale, targets=targets, parameters=parameters)


def _refuse_unsupported(given: dict[str, Any]) -> None:
    if given.get("bias", "none") != "none":
        raise RequestError(f"bias {given['bias']!r} is not supported: adapters have no biases here")
    for name, value in given.items():
        if value and name not in _HONOURED and name not in _WITHOUT_EFFECT:
            raise RequestError(f"{name} is not supported by this engine: retrain without it")
    start = given.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise RequestError(
            f"init_lora_weights {start!r} changes the base weights: convert the adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )


def _targets(given: dict[str, Any]) -> tuple[str, ...]:
    """Return the module names that must be complete; a pattern or a choice of layers names none."""
    targets = given.get("target_modules")
    partial = any(
        given.get(name) for name in ("exclude_modules", "layers_to_transform", "layers_pattern")
    )
    if partial or targets is None or isinstance(targets, str):
        return ()
    return _names(given, "target_modules")


def _names(given: dict[str, Any], field: str) -> tuple[str, ...]:
    names = given.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RequestError(f"{field} must be a list of strings")
    return tuple(names)


def pair_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, LoraPair]:
    """Return the matrices by module; raise RequestError for a tensor that is no LoRA matrix."""
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


def read_config(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / CONFIG_FILE
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise RequestError(f"{path} is larger than {_LARGEST_CONFIG} bytes")
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error


def read_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    path = Path(folder) / TENSORS_FILE
    if not path.is_file():
        raise RequestError(
            f"{path} does not exist; this engine reads safetensors only, no pickled adapter_model.bin"
        )
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
