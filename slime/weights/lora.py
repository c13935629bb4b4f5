"""Adapters as PEFT folders: written by a run, merged into the weights of their base."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slime.config.checks.file_checks import weight_files, weight_shapes
from slime.config.lora import (
    CONFIG_FILE,
    LORA_A,
    LORA_B,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    LoraConfig,
    adapter_modules,
    adapter_shapes,
    linear_modules,
    refuse_other_base,
)
from slime.config.peft_files import (
    bound_modules,
    expert_of,
    is_experts,
    peft_modules,
)
from slime.core.errors import ConfigError, UserError
from slime.runlog.export_folder import ExportInfo, begin_export, commit_export, discard_export
from slime.weights.buckets import HFTensors, NamedTensor, hf_views, merge_adapter
from slime.weights.hf_folder import new_hf_folder


def write_peft_folder(
    path: str, config: LoraConfig, base: str, named: HFTensors, info: ExportInfo | None = None
) -> None:
    """Write adapters, by Hugging Face name, as a folder for `peft` and for engines.

    The complete folder is renamed to `path`.
    """
    tensors = {PEFT_PREFIX + name: tensor.cpu().contiguous() for name, tensor in named}
    modules = [n.removeprefix(PEFT_PREFIX).removesuffix(LORA_A) for n in tensors if LORA_A in n]
    try:
        folder = begin_export(path)
        text = json.dumps(config.to_peft(base, modules), indent=2) + "\n"
        (folder / CONFIG_FILE).write_text(text)
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        commit_export(path, info or ExportInfo())
    except BaseException:
        discard_export(path)
        raise


def initial_a(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the initial lora_A of this name: uniform within 1 / sqrt(in), as in PEFT.

    It depends on the name and the seed alone, so backends and layouts start from the same adapters.
    """
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(*shape, device="cpu").uniform_(-bound, bound, generator=generator)


def read_peft_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return the adapters of a PEFT folder by Hugging Face name."""
    named = load_file(Path(folder) / WEIGHTS_FILE)
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in named.items()}


def to_peft(adapters: HFTensors) -> Iterator[NamedTensor]:
    """Yield adapters of modules, and of parameters with all experts, under PEFT's names and in its layout.

    Those of experts are [E, rank, in] and [E, out, rank], without E where experts share a matrix.
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


def from_peft(tensor: torch.Tensor, name: str, num_experts: int, shared: bool) -> torch.Tensor:
    """Return lora_A [E, rank, in] or lora_B [E, out, rank] of experts; without E if they share it."""
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

    Weights keep the dtype of the base. One file of the base is in memory at a time.
    """
    for flag, folder in (("--base", base), ("--adapter", adapter)):
        if Path(folder).resolve() == Path(output).resolve():
            raise ConfigError(f"--output-dir {output} is the folder of {flag}: name a new one")
    config = LoraConfig.read(adapter, "--adapter")
    named = adapter_modules(Path(adapter), "--adapter")
    files = _base_files(base)
    _refuse_misfits(config, adapter, named, weight_shapes(base, "--base"))
    tensors = dict(_one_by_one(read_peft_weights(adapter), config, base))
    modules = [name.removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    dtype = _dtype_of(f"{modules[0]}.weight", files)
    for name, tensor in tensors.items():
        if not tensor.float().isfinite().all():
            raise ConfigError(f"--adapter {adapter}: {name} holds values that are not finite")
    with new_hf_folder(output, base, dtype) as folder:
        for file in files:
            folder.add(_merged(file, tensors, config))
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


def _one_by_one(
    adapters: dict[str, torch.Tensor], config: LoraConfig, base: str
) -> Iterator[NamedTensor]:
    """Yield adapters of experts under the names that each expert's weights have in a checkpoint."""
    model_type = json.loads((Path(base) / "config.json").read_text()).get("model_type", "")
    modules = [name.removesuffix(LORA_A) for name in adapters if name.endswith(LORA_A)]
    for module, bound in bound_modules(modules, config.target_modules).items():
        a, b = adapters[module + LORA_A], adapters[module + LORA_B]
        if not is_experts(bound):
            yield from ((bound + LORA_A, a), (bound + LORA_B, b))
            continue
        count = a.shape[0] // config.rank
        a, b = (from_peft(x, side, count, False) for x, side in ((a, LORA_A), (b, LORA_B)))
        for name, rows in hf_views([(bound, b)], model_type=model_type):
            expert = expert_of(name)
            assert expert is not None, f"{name} was checked to be one expert's"
            yield name.removesuffix(".weight") + LORA_A, a[expert]
            yield name.removesuffix(".weight") + LORA_B, rows


def _merged(
    file: Path, adapters: dict[str, torch.Tensor], config: LoraConfig
) -> Iterator[NamedTensor]:
    for name, weight in load_file(file).items():
        module = name.removesuffix(".weight")
        if module + LORA_A in adapters:
            a, b = adapters[module + LORA_A], adapters[module + LORA_B]
            weight = merge_adapter(weight, a, b, config.scaling, weight.dtype)
        yield name, weight


def _dtype_of(name: str, files: Iterable[Path]) -> torch.dtype:
    """Return the dtype of the weights that are changed; refuse those with scales beside them."""
    for file in files:
        with safe_open(file, "pt") as opened:
            if name in opened.keys():  # noqa: SIM118 -- no mapping
                dtype = opened.get_tensor(name).dtype
                break
    else:
        raise AssertionError(f"{name} was found in the headers of these files")
    if dtype.itemsize == 1:
        raise ConfigError(
            f"--base: {file} holds {str(dtype).removeprefix('torch.')} weights: give the model's bf16 weights"
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
