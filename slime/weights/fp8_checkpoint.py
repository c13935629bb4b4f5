"""A Hugging Face checkpoint with its matrices in FP8: conversion file by file, and loading.

A file is renamed to its final name when it is complete, so an interrupted conversion resumes where it
stopped; config.json comes last, so an unfinished folder cannot be loaded.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.core.errors import UserError
from slime.data.tokenizer import load_hf_config
from slime.weights.fp8 import (
    FP8,
    Fp8Format,
    declaration,
    dequantize,
    format_of,
    is_quantized,
    quantize_all,
)

_INDEX = "model.safetensors.index.json"
_SETTINGS = "fp8_conversion.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def convert_to_fp8(
    source: Path,
    target: Path,
    layout: Fp8Format,
    *,
    max_workers: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    config = _read_config(source)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UserError(f"--model-dir {source} holds no .safetensors files")
    _check_settings(target, layout)
    done = [file for file in files if (target / file.name).exists()]
    if done:
        say(f"{len(done)} of {len(files)} files exist from an earlier conversion")
    missing = [file for file in files if file not in done]
    with ThreadPoolExecutor(max_workers) as pool:
        calls = {pool.submit(_convert, file, target / file.name, layout): file for file in missing}
        for number, call in enumerate(as_completed(calls), start=len(done) + 1):
            call.result()
            say(f"{number}/{len(files)} {calls[call].name}")
    _write_index(target, [target / file.name for file in files])
    _copy_rest(source, target)
    kept = _kept_modules(files)
    config["quantization_config"] = declaration(layout, kept)
    _replace(target / "config.json", json.dumps(config, indent=2) + "\n")
    (target / _SETTINGS).unlink()


def load_causal_lm(path: str, config: Any = None, *, dtype: Any = "auto", **options: Any) -> Any:
    """Call AutoModelForCausalLM.from_pretrained; FP8 weights are dequantized to the dtype of the rest."""
    from transformers import AutoModelForCausalLM

    config = config or load_hf_config(path)
    fp8 = format_of(config.to_dict())
    if fp8 is None:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, **{"trust_remote_code": False, **options}
        )
    config = copy.deepcopy(config)
    del config.quantization_config
    dtype = (config.dtype or torch.bfloat16) if dtype == "auto" else dtype
    state = read_dequantized(Path(path), fp8, dtype)
    model: Any = AutoModelForCausalLM._model_mapping[type(config)]
    return model.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **options)


def read_dequantized(
    folder: Path, layout: Fp8Format, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors of an FP8 checkpoint, dequantized to `dtype`, without their scales."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    dequantized = {}
    for name, tensor in found.items():
        if tensor.dtype == FP8:
            scale = found[name.removesuffix("weight") + layout.scale_suffix]
            dequantized[name] = dequantize(tensor, scale, layout).to(dtype)
        elif not name.endswith(layout.scale_suffix):
            dequantized[name] = tensor.to(dtype)
    return dequantized


def _read_config(source: Path) -> dict:
    path = source / "config.json"
    if not path.is_file():
        raise UserError(f"--model-dir {source} has no config.json: give a Hugging Face folder")
    config = json.loads(path.read_text())
    if format_of(config) is not None:
        raise UserError(f"--model-dir {source} is in FP8 already")
    return config


def _check_settings(target: Path, layout: Fp8Format) -> None:
    """Raise UserError unless the folder is new or was begun by a conversion with the same settings."""
    target.mkdir(parents=True, exist_ok=True)
    settings = {"strategy": layout.strategy, "block": list(layout.block)}
    path = target / _SETTINGS
    if path.exists():
        before = json.loads(path.read_text())
        if before != settings:
            raise UserError(
                f"--save-dir {target} holds part of a conversion with {before}; delete it, or use the "
                "same options"
            )
    elif any(target.iterdir()):
        raise UserError(f"--save-dir {target} is not empty; name a new folder, or delete it")
    else:
        path.write_text(json.dumps(settings))


def _convert(source: Path, target: Path, layout: Fp8Format) -> None:
    with safe_open(source, framework="pt") as file:
        tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        converted = {name: t.contiguous() for name, t in quantize_all(tensors, layout)}
    partial = target.with_suffix(".partial")
    save_file(converted, partial, metadata={"format": "pt"})
    partial.replace(target)


def _write_index(target: Path, files: list[Path]) -> None:
    weight_map, total = {}, 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                weight_map[name] = path.name
        total += path.stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _replace(target / _INDEX, json.dumps(index, indent=2) + "\n")


def _copy_rest(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES) and path.name != "config.json":
            shutil.copy(path, target / path.name)


def _kept_modules(files: list[Path]) -> list[str]:
    """Return the linear layers that are not quantized; embeddings are no linear layers."""
    kept = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                dimensions = len(file.get_slice(name).get_shape())
                linear = dimensions == 2 and name.endswith(".weight") and "embed" not in name
                if linear and not is_quantized(name, dimensions):
                    kept.add(name.removesuffix(".weight"))
    return sorted(kept | {"lm_head"})


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
