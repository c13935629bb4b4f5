"""Frozen base weights that stay in FP8 blocks, as the checkpoint stores them, below LoRA adapters.

A matrix is dequantized for its matmul and once more in the backward pass; only FP8 values are kept::

    model.layers.0.mlp.up_proj.weight             [out, in / 2]        two FP8 values per bf16 element
    model.layers.0.mlp.up_proj.weight_scale_inv   [out / 128, in / 128]  fp32, a buffer on every rank
    mlp.experts.gate_up_proj                      [E, 2 W, H / 2]
    mlp.experts.gate_up_proj_scale_inv            [E, 2 W / 128, H / 128], gate and up in blocks of their own

Values are packed into elements of the compute dtype, because FSDP casts every other dtype to it when it
gathers a layer, and torch before 2.13 does not shard integers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from slime.backends.base import first_weights
from slime.backends.kernels.fused_ops import SCALE
from slime.config.checks.file_checks import file_shapes, weight_files, weight_names
from slime.config.peft_files import GATE_UP
from slime.core.errors import UserError
from slime.weights.buckets import StoredNames, hf_views
from slime.weights.fp8 import FP8, dequantize, lacks_scale
from slime.weights.fp8_format import Fp8Format, format_of, is_quantized

if TYPE_CHECKING:
    from slime.config.arguments import Args


def fp8_base_format(args: Args) -> Fp8Format | None:
    """Return the block-FP8 format of the base checkpoint, or None."""
    if args.ref_load and args.ref_ckpt_step is not None:  # a checkpoint of a run
        return None
    config = Path(first_weights(args, "actor")) / "config.json"
    found = format_of(json.loads(config.read_text())) if config.is_file() else None
    blocks = found is not None and found.scale_suffix == "weight" + SCALE
    return found if blocks else None


def hold_in_fp8(module: Any, leaf: str, layout: Fp8Format) -> None:
    """Replace a parameter [..., out, in] of the module by packed values and a buffer of scales."""
    param = getattr(module, leaf)
    *experts, rows, columns = param.shape
    shape = (*experts, rows, columns // param.element_size())
    packed = torch.empty(shape, dtype=param.dtype, device=param.device)
    setattr(module, leaf, nn.Parameter(packed, requires_grad=False))
    parts = 2 if leaf == GATE_UP else 1
    blocks = parts * -(-rows // parts // layout.block[0]), -(-columns // layout.block[1])
    module.register_buffer(leaf + SCALE, torch.ones(*experts, *blocks), persistent=False)
    module.fp8 = layout


def matrix_shape(module: nn.Module, leaf: str) -> tuple[int, ...]:
    """Return the shape [..., out, in] of a parameter that may be packed."""
    param = module.get_parameter(leaf)
    packed = param.element_size() if hasattr(module, leaf + SCALE) else 1
    return (*param.shape[:-1], param.shape[-1] * packed)


def quantized_parameters(hf: PreTrainedModel, folder: str, stored: StoredNames) -> list[str]:
    """Return the parameters that a checkpoint holds in FP8; without files, those an FP8 checkpoint would hold."""
    known = set(weight_names(folder))
    names = []
    for name, param in hf.named_parameters():
        if param.ndim < 2 or param.shape[-1] % param.element_size():
            continue
        parts = hf_views([(name, param)], model_type=hf.config.model_type or "", stored=stored)
        if all(n + SCALE in known if known else is_quantized(n, t.ndim) for n, t in parts):
            names.append(name)
    return names


def check_shape(path: str, name: str, wanted: torch.Size, found: Sequence[int] | None) -> None:
    """Raise UserError unless a checkpoint holds this tensor in the wanted shape."""
    if found is None or tuple(found) != wanted:
        has = "no such tensor" if found is None else f"shape {tuple(found)}"
        raise UserError(
            f"{path} is a checkpoint of another architecture than --hf-checkpoint: "
            f"{name} should have shape {tuple(wanted)}, it has {has}"
        )


class BaseFiles:
    """The tensors of an FP8 checkpoint under the names of the model's parameters and scales."""

    def __init__(
        self, hf: PreTrainedModel, folder: str, stored: StoredNames, layout: Fp8Format
    ) -> None:
        self._folder, self._stored, self._layout = folder, stored, layout
        self._model_type = hf.config.model_type or ""
        self._shapes: dict[str, list[int]] = {}
        self._files: dict[str, Path] = {}
        for file in weight_files(Path(folder), "--hf-checkpoint"):
            shapes = file_shapes(file, "--hf-checkpoint")
            self._shapes |= shapes
            self._files |= dict.fromkeys(shapes, file)

    def check(self, name: str, target: torch.Tensor, *, packed: bool) -> None:
        """Raise UserError unless the files hold this tensor, split or fused; only headers are read."""
        meta = torch.empty(target.shape, dtype=target.dtype, device="meta")
        for stored, part in self._parts(name, meta, packed):
            check_shape(self._folder, stored, part.shape, self._shapes.get(stored))

    def read(self, name: str, target: torch.Tensor, *, packed: bool) -> torch.Tensor:
        """Return the whole tensor in the dtype of the target."""
        whole = torch.empty(target.shape, dtype=target.dtype)
        for stored, part in self._parts(name, whole, packed):
            tensor = self._tensor(stored)
            if packed and tensor.dtype != FP8:
                raise UserError(f"{self._folder}: {stored} has scales and is not in FP8")
            if tensor.dtype == FP8 and not packed:  # its layer computes without FP8
                if stored + SCALE not in self._files:
                    raise UserError(lacks_scale(self._folder, stored, stored + SCALE))
                tensor = dequantize(tensor, self._tensor(stored + SCALE), self._layout)
            part.copy_(tensor)
        return whole

    def _tensor(self, stored: str) -> torch.Tensor:
        with safe_open(self._files[stored], framework="pt") as file:
            return file.get_tensor(stored)

    def _parts(
        self, name: str, whole: torch.Tensor, packed: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names in the files, each with the view of the tensor that it fills."""
        values = whole.view(FP8) if packed else whole
        parameter = name.removesuffix(SCALE)
        suffix = name.removeprefix(parameter)
        views = hf_views([(parameter, values)], model_type=self._model_type, stored=self._stored)
        return ((stored + suffix, part) for stored, part in views)
