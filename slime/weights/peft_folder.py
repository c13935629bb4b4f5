"""Adapters as PEFT folders: written by a run, merged into the weights of their base."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slime.config.checks.file_checks import file_shapes, weight_files
from slime.config.lora import LoraConfig, refuse_other_base
from slime.config.peft_files import (
    CONFIG_FILE,
    GATE_UP,
    LORA_A,
    LORA_B,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    adapter_modules,
    adapter_shapes,
    bound_modules,
    decoder_shapes,
    expert_of,
    flat_name,
    is_experts,
    linear_modules,
    peft_modules,
)
from slime.core.errors import ConfigError, UserError
from slime.runlog.export_folder import ExportInfo, new_export
from slime.weights.buckets import HFTensors, NamedTensor, hf_views, merge_adapter
from slime.weights.fp8 import dequantized
from slime.weights.fp8_format import format_of, refuse_unreadable
from slime.weights.hf_folder import new_hf_folder


def write_peft_folder(
    path: str, config: LoraConfig, base: str, named: HFTensors, info: ExportInfo | None = None
) -> None:
    """Write adapters, by Hugging Face name, as a folder for `peft` and for engines.

    The complete folder is renamed to `path`.
    """
    tensors = {PEFT_PREFIX + name: tensor.cpu().contiguous() for name, tensor in named}
    modules = [n.removeprefix(PEFT_PREFIX).removesuffix(LORA_A) for n in tensors if LORA_A in n]
    with new_export(path, info) as folder:
        text = json.dumps(config.to_peft(base, modules), indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def initial_a(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the initial lora_A of this name: uniform within 1 / sqrt(in), as in PEFT.

    It depends on the name and the seed alone, so backends and layouts start from the same adapters.
    """
    digest = hashlib.blake2b(f"{seed} {flat_name(name)}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(*shape, device="cpu").uniform_(-bound, bound, generator=generator)


def read_peft_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return the adapters of a PEFT folder by the names of the text model alone."""
    named = load_file(Path(folder) / WEIGHTS_FILE)
    return {flat_name(name.removeprefix(PEFT_PREFIX)): tensor for name, tensor in named.items()}


def to_peft(adapters: HFTensors) -> Iterator[NamedTensor]:
    """Yield adapters of modules, and of parameters with all experts, under PEFT's names and in its layout.

    Those of experts are [E, rank, in] and [E, out, rank], without E if experts share a matrix.
    """
    held = dict(adapters)
    modules = [name.removesuffix(LORA_A) for name in held if name.endswith(LORA_A)]
    for module, name in peft_modules(modules).items():
        a, b = held[module + LORA_A], held[module + LORA_B]
        if is_experts(module):
            count = (a if a.ndim == 3 else b).shape[0]
            a = a.expand(count, *a.shape[-2:]).flatten(0, 1)
            b = b.expand(count, *b.shape[-2:]).permute(1, 2, 0).flatten(1)
        yield name + LORA_A, a
        yield name + LORA_B, b


def by_weights(adapters: HFTensors, model_type: str) -> Iterator[NamedTensor]:
    """Yield adapters by the names of the weights of a checkpoint, which has one matrix per expert.

    Those of experts are in the layout that `to_peft` takes.
    """
    held = dict(adapters)
    for module in [name.removesuffix(LORA_A) for name in held if name.endswith(LORA_A)]:
        a, b = held[module + LORA_A], held[module + LORA_B]
        if not is_experts(module):
            yield from ((module + LORA_A, a), (module + LORA_B, b))
            continue
        count = (a if a.ndim == 3 else b).shape[0]
        a, b = (x.expand(count, *x.shape[-2:]) for x in (a, b))
        for name, rows in hf_views([(module, b)], model_type=model_type):
            expert = expert_of(name)
            assert expert is not None, f"{name} was checked to be one expert's"
            yield name.removesuffix(".weight") + LORA_A, a[expert]
            yield name.removesuffix(".weight") + LORA_B, rows


def by_modules(
    tensors: dict[str, torch.Tensor], names: dict[str, str], lora: LoraConfig
) -> Iterator[NamedTensor]:
    """Yield the adapters of PEFT's file by the modules that they adapt, the inverse of `to_peft`.

    `names` are those modules by their names in the file.
    """
    for name, module in names.items():
        count = tensors[name + LORA_A].shape[0] // lora.rank
        for side in (LORA_A, LORA_B):
            tensor = tensors[name + side]
            if is_experts(module):
                is_outer = module.endswith(GATE_UP) == (side == LORA_A)
                shared = lora.experts_shared_outer and is_outer
                tensor = from_peft(tensor, module + side, count, shared)
            yield module + side, tensor


def from_peft(tensor: torch.Tensor, name: str, num_experts: int, shared: bool) -> torch.Tensor:
    """Return lora_A [E, rank, in] or lora_B [E, out, rank] of experts; without E if shared."""
    if name.endswith(LORA_A):
        stacked = tensor.unflatten(0, (num_experts, -1))
    else:
        stacked = tensor.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    if not shared:
        return stacked.contiguous()
    if not torch.equal(stacked, stacked[:1].expand_as(stacked)):
        raise UserError(
            f"--lora-experts-shared-outer: {name} of --lora-adapter-path differs between experts: remove "
            "the flag"
        )
    return stacked[0].contiguous()


def merge_lora(base: str, adapter: str, output: str) -> int:
    """Write the base model with an adapter merged in; return the number of changed weights.

    Weights keep the dtype of the base; those in FP8 are dequantized. One file of the base is in memory
    at a time.
    """
    for flag, folder in (("--base", base), ("--adapter", adapter)):
        if Path(folder).resolve() == Path(output).resolve():
            raise ConfigError(f"--output-dir {output} is the folder of {flag}: name a new one")
    config = LoraConfig.read(adapter, "--adapter")
    named = adapter_modules(Path(adapter), "--adapter")
    files = _base_files(base)
    fields = json.loads((Path(base) / "config.json").read_text())
    refuse_unreadable(Path(base), fields)
    fp8 = format_of(fields)
    shapes = decoder_shapes(base, "--base")
    _refuse_misfits(config, adapter, named, shapes)
    bound = bound_modules(named, config.target_modules)
    own = dict(by_modules(read_peft_weights(adapter), bound, config))
    fused = {n: t for n, t in own.items() if n.removesuffix(LORA_A).removesuffix(LORA_B) in shapes}
    others = [(name, tensor) for name, tensor in own.items() if name not in fused]
    tensors = {**fused, **dict(by_weights(others, fields.get("model_type", "")))}
    modules = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    stored = {_module_of(name) for file in files for name in file_shapes(file, "--base")}
    if absent := [module for module in modules if module not in stored]:
        raise ConfigError(f"--adapter {adapter}: --base has no weight of {absent[0]}")
    dtype = _dtype_of(modules[0], files) if fp8 is None else _declared_dtype(fields)
    for name, tensor in tensors.items():
        if not tensor.float().isfinite().all():
            raise ConfigError(f"--adapter {adapter}: {name} holds values that are not finite")
    with new_hf_folder(output, base, dtype, quantized=fp8 is None) as folder:
        for file in files:
            held: HFTensors = load_file(file).items()
            if fp8 is not None:
                held = dequantized(held, Path(base), fp8, dtype)
            folder.add(_merged(held, tensors, config))
    return len(modules)


def _base_files(base: str) -> list[Path]:
    files = weight_files(Path(base), "--base")
    if not files or not (Path(base) / "config.json").is_file():
        lacking = "config.json" if files else "safetensors files"
        raise ConfigError(
            f"--base {base} has no {lacking}: give the folder of a Hugging Face model"
        )
    return files


def _refuse_misfits(
    config: LoraConfig, adapter: str, modules: list[str], shapes: dict[str, list[int]]
) -> None:
    bound = list(bound_modules(modules, config.target_modules).values())
    linear, experts = linear_modules(shapes)
    single = (
        n.removesuffix(".weight") for n, s in shapes.items() if ".experts." in n and len(s) == 2
    )
    known = {*linear, *experts, *single}
    absent = sorted(module for module in bound if module not in known)
    if absent or not modules:
        what = f"{absent[0]} is no linear module of --base" if absent else "it has no adapters"
        raise ConfigError(f"--adapter {adapter}: {what}")
    wanted = config.tensor_shapes(bound, shapes)
    refuse_other_base(adapter_shapes(Path(adapter), "--adapter"), wanted, adapter, "--base")


def _declared_dtype(fields: dict[str, Any]) -> torch.dtype:
    """Return the dtype that the config.json of an FP8 checkpoint declares for its other weights."""
    declared = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), None)
    return declared if isinstance(declared, torch.dtype) else torch.bfloat16


def _merged(
    held: HFTensors, adapters: dict[str, torch.Tensor], config: LoraConfig
) -> Iterator[NamedTensor]:
    for name, weight in held:
        module = _module_of(name)
        if module + LORA_A in adapters:
            a, b = adapters[module + LORA_A], adapters[module + LORA_B]
            weight = merge_adapter(weight, a, b, config.scaling, weight.dtype)
        yield name, weight


def _module_of(name: str) -> str:
    """Return the module, or the parameter of experts, whose weight has this name in a checkpoint."""
    return flat_name(name).removesuffix(".weight")


def _dtype_of(module: str, files: Iterable[Path]) -> torch.dtype:
    """Return the dtype of the merged weights; refuse FP8 that config.json does not declare."""
    for file in files:
        with safe_open(file, "pt") as opened:
            name = next((name for name in opened.keys() if _module_of(name) == module), None)  # noqa: SIM118
            if name is not None:
                dtype = opened.get_tensor(name).dtype
                break
    else:
        raise AssertionError(f"{module} was found in the headers of these files")
    if dtype.itemsize == 1:
        raise ConfigError(
            f"--base: {file} holds {str(dtype).removeprefix('torch.')} weights and config.json no "
            "quantization_config: give the model's bf16 weights"
        )
    return dtype


def main(argv: list[str]) -> int:
    """`slime convert merge-lora`."""
    parser = argparse.ArgumentParser(prog="slime convert merge-lora", description=main.__doc__)
    parser.add_argument("--base", required=True, help="folder of the base model")
    parser.add_argument("--adapter", required=True, help="PEFT folder")
    parser.add_argument("--output-dir", required=True, help="folder to write the merged model to")
    options = parser.parse_args(argv)
    count = merge_lora(options.base, options.adapter, options.output_dir)
    print(f"{options.output_dir}: {count} weights with their adapters merged in")
    return 0
