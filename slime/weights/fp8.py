"""FP8 weights (e4m3) in the layouts that checkpoints use, and conversion of checkpoints.

strategy  scale of X.weight [out, in]                      read by
block     X.weight_scale_inv [out/128, in/128]             "quant_method": "fp8", "weight_block_size"
block     X.weight_scale [out/128, in/128]                 "quant_method": "compressed-tensors"
channel   X.weight_scale [out, 1]                          "quant_method": "compressed-tensors"
tensor    X.weight_scale []                                "quant_method": "fp8"

In all of them weight ≈ fp8 x scale, and the largest value that a scale covers becomes 448. The tool
that converts checkpoints and the trainer that updates engines call the same function, so they agree
bit by bit.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.config.checks.file_checks import file_shapes, weight_files
from slime.core.errors import UserError
from slime.data.tokenizer import load_hf_config
from slime.runlog.jsonl import replace_file
from slime.weights.buckets import hf_views
from slime.weights.fp8_format import (
    Choice,
    Fp8Format,
    declaration,
    format_of,
    is_quantized,
    refuse_unreadable,
)

Named = tuple[str, torch.Tensor]

FP8 = torch.float8_e4m3fn
_FUSED_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")  # their experts are fused in bf16, not in FP8
_SPLIT = (".experts.gate_up_proj", ".experts.down_proj")  # by `hf_views`
_FUSED = (".experts.", ".input_linear.", ".output_linear.")  # in names of fused experts
_LARGEST = 448.0  # of e4m3
_FLAG = "--hf-checkpoint"


def quantize_all(
    tensors: Iterable[Named], layout: Fp8Format, quantizes: Choice = is_quantized
) -> Iterator[Named]:
    """Yield every tensor as the checkpoint holds it: FP8 tensors are followed by their scales."""
    for name, tensor in tensors:
        if not quantizes(name, tensor.ndim):
            yield name, tensor
            continue
        weight, scale = quantize(tensor, layout)
        yield name, weight
        yield layout.scale_name(name), scale


def quantize(tensor: torch.Tensor, layout: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 values and float32 scales of a matrix."""
    wide = tensor.detach().float()
    scale = _scale(_largest(wide, layout))
    if layout.scale_fmt == "ue8m0":
        scale = _next_power_of_two(scale)
    values = (wide / _spread(scale, layout, wide.shape)).clamp(-_LARGEST, _LARGEST).to(FP8)
    return values, scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, layout: Fp8Format) -> torch.Tensor:
    """Return the float32 matrix [..., out, in] of FP8 values and their scales."""
    wide, scale = weight.to(torch.float32, copy=True), scale.float()
    if layout.strategy == "block" and all(
        size == count * block
        for size, count, block in zip(wide.shape[-2:], scale.shape[-2:], layout.block, strict=True)
    ):  # whole blocks, so that scales need not be expanded to the size of the matrix
        columns = wide.unflatten(-1, (scale.shape[-1], layout.block[1]))
        blocks = columns.unflatten(-3, (scale.shape[-2], layout.block[0]))
        blocks.mul_(scale[..., :, None, :, None])
        return wide
    return wide.mul_(_spread(scale, layout, wide.shape))


def _largest(wide: torch.Tensor, layout: Fp8Format) -> torch.Tensor:
    size = wide.abs()
    if layout.strategy == "tensor":
        return size.amax()
    if layout.strategy == "channel":
        return size.amax(1, keepdim=True)
    rows, columns = layout.block
    pad = (0, -wide.shape[1] % columns, 0, -wide.shape[0] % rows)
    size = torch.nn.functional.pad(size, pad)
    grid = size.view(size.shape[0] // rows, rows, size.shape[1] // columns, columns)
    return grid.amax((1, 3))


def _scale(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))


def _next_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Round up, exactly: a scale is mantissa x 2^exponent with a mantissa in [0.5, 1)."""
    mantissa, exponent = torch.frexp(scale)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(scale), exponent)


def _spread(scale: torch.Tensor, layout: Fp8Format, shape: torch.Size) -> torch.Tensor:
    """Expand scales to one per element."""
    if layout.strategy != "block":
        return scale
    rows, columns = layout.block
    wide = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return wide[..., : shape[-2], : shape[-1]]


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
    split = config["model_type"] in _FUSED_TYPES
    _refuse_fused_experts(source, files, split=split)
    _check_settings(target, layout)
    done = [file for file in files if (target / file.name).exists()]
    if done:
        say(f"{len(done)} of {len(files)} files exist from an earlier conversion")
    missing = [file for file in files if file not in done]
    with ThreadPoolExecutor(max_workers) as pool:
        calls = {
            pool.submit(_convert, file, target / file.name, layout, split=split): file
            for file in missing
        }
        for number, call in enumerate(as_completed(calls), start=len(done) + 1):
            call.result()
            say(f"{number}/{len(files)} {calls[call].name}")
    _write_index(target, [target / file.name for file in files])
    _copy_rest(source, target)
    kept = _kept_modules(files)
    config["quantization_config"] = declaration(layout, kept)
    replace_file(target / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    (target / _SETTINGS).unlink()


def load_causal_lm(
    path: str, config: Any = None, *, auto: Any = None, dtype: Any = "auto", **options: Any
) -> Any:
    """Call from_pretrained of `auto`, by default AutoModelForCausalLM.

    FP8 weights are dequantized to the dtype of the rest.
    """
    from transformers import AutoModelForCausalLM

    auto = auto or AutoModelForCausalLM
    config = config or load_hf_config(path)
    declared = config.to_dict()
    refuse_unreadable(Path(path), declared)
    fp8 = format_of(declared)
    if fp8 is None:
        _refuse_undeclared(Path(path))
        return auto.from_pretrained(
            path, config=config, dtype=dtype, **{"trust_remote_code": False, **options}
        )
    config = copy.deepcopy(config)
    del config.quantization_config
    dtype = (config.dtype or torch.bfloat16) if dtype == "auto" else dtype
    state = read_dequantized(Path(path), fp8, dtype)
    model: Any = auto._model_mapping[type(config)]
    if model.config_class is type(config.get_text_config()):  # beside a vision tower
        config = config.get_text_config()
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
            scale = layout.scale_name(name)
            if scale not in found:
                raise UserError(lacks_scale(str(folder), name, scale))
            dequantized[name] = dequantize(tensor, found[scale], layout).to(dtype)
        elif not name.endswith(layout.scale_suffix):
            dequantized[name] = tensor.to(dtype)
    return dequantized


def dequantized(
    held: Iterable[Named], folder: Path, layout: Fp8Format, dtype: torch.dtype
) -> Iterator[Named]:
    """Yield some tensors of an FP8 checkpoint without scales, which may be in another of its files."""
    files = {
        name: file for file in weight_files(folder, _FLAG) for name in file_shapes(file, _FLAG)
    }
    for name, weight in held:
        if weight.dtype == FP8:
            scale = layout.scale_name(name)
            if scale not in files:
                raise UserError(lacks_scale(str(folder), name, scale))
            with safe_open(files[scale], "pt") as opened:
                yield name, dequantize(weight, opened.get_tensor(scale), layout).to(dtype)
        elif not name.endswith(layout.scale_suffix):
            yield name, weight


def _refuse_undeclared(folder: Path) -> None:
    """Raise UserError for FP8 weights that config.json does not declare: transformers would not scale them."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if file.get_slice(name).get_dtype() == "F8_E4M3":
                    raise UserError(
                        f"{folder}: {name} is in FP8 and config.json has no quantization_config: "
                        "convert or download the checkpoint again"
                    )


def lacks_scale(folder: str, name: str, scale: str) -> str:
    """Return the message for an FP8 tensor of a checkpoint that cannot be dequantized."""
    return (
        f"{folder}: {name} is in FP8 and has no {scale}: convert or download the checkpoint again"
    )


def _read_config(source: Path) -> dict:
    path = source / "config.json"
    if not path.is_file():
        raise UserError(f"--model-dir {source} has no config.json: give a Hugging Face folder")
    config = json.loads(path.read_text())
    if format_of(config) is not None:
        raise UserError(f"--model-dir {source} is in FP8 already")
    refuse_unreadable(source, config)
    return config


def _refuse_fused_experts(source: Path, files: list[Path], *, split: bool) -> None:
    """Raise UserError for experts in one tensor that `_convert` does not split: they would stay in bf16."""
    splits = _SPLIT if split else ()
    for path in files:
        for name, shape in file_shapes(path, "--model-dir").items():
            fused = len(shape) > 2 and any(part in name for part in _FUSED)
            if fused and not name.endswith(splits):
                raise UserError(
                    f"--model-dir {source}: {name} {shape} holds all experts of a layer, and only those "
                    f"of {', '.join(_FUSED_TYPES)} are split: give a checkpoint with a tensor per expert"
                )


def _check_settings(target: Path, layout: Fp8Format) -> None:
    """Raise UserError unless the folder is new or was begun by a conversion with the same settings."""
    target.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"strategy": layout.strategy, "block": list(layout.block)}
    if layout.scale_fmt:
        settings["scale_fmt"] = layout.scale_fmt
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


def _convert(source: Path, target: Path, layout: Fp8Format, *, split: bool) -> None:
    with safe_open(source, framework="pt") as file:
        tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        tensors = hf_views(tensors, model_type="") if split else tensors
        converted = {name: t.contiguous() for name, t in quantize_all(tensors, layout)}
    partial = target.with_suffix(".partial")
    save_file(converted, partial, metadata={"format": "pt"})
    partial.replace(target)


def _write_index(target: Path, files: list[Path]) -> None:
    weight_map = {name: path.name for path in files for name in file_shapes(path, "--save-dir")}
    total = sum(path.stat().st_size for path in files)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    replace_file(target / _INDEX, json.dumps(index, indent=2).encode() + b"\n")


def _copy_rest(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_FILES) and path.name != "config.json":
            shutil.copy(path, target / path.name)


def _kept_modules(files: list[Path]) -> list[str]:
    """Return the linear layers that are not quantized; embeddings do not count."""
    kept = {"lm_head"}
    for path in files:
        for name, shape in file_shapes(path, "--model-dir").items():
            linear = len(shape) == 2 and name.endswith(".weight") and "embed" not in name
            if linear and not is_quantized(name, len(shape)):
                kept.add(name.removesuffix(".weight"))
    return sorted(kept)
