"""Weights in FP8 (e4m3), in the three layouts that checkpoints use.

strategy  scale of X.weight [out, in]                      read by
block     X.weight_scale_inv [out/128, in/128]             "quant_method": "fp8", "weight_block_size"
channel   X.weight_scale [out, 1]                          "quant_method": "compressed-tensors"
tensor    X.weight_scale []                                "quant_method": "fp8"

In all of them weight ≈ fp8 x scale, and the largest value that a scale covers becomes 448. The tool that
converts checkpoints and the trainer that updates engines call the same function, so they agree bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Strategy = Literal["block", "channel", "tensor"]
Named = tuple[str, torch.Tensor]

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3
# Never quantized: small, or too sensitive. The router of a MoE layer is called gate or router.
_KEPT = (
    "embed",
    "lm_head",
    "norm",
    "router",
    "mlp.gate.",
    "shared_expert_gate",
    "eh_proj",
    "visual",
)


@dataclass(kw_only=True, frozen=True)
class Fp8Format:
    strategy: Strategy
    block: tuple[int, int] = (128, 128)

    @property
    def scale_suffix(self) -> str:
        return "weight_scale_inv" if self.strategy == "block" else "weight_scale"


def is_quantized(name: str, num_dimensions: int) -> bool:
    """Return whether the tensor of this Hugging Face name is stored in FP8."""
    return name.endswith(".weight") and num_dimensions == 2 and not any(k in name for k in _KEPT)


def quantize_all(tensors: Iterable[Named], layout: Fp8Format) -> Iterator[Named]:
    """Yield every tensor as the checkpoint holds it: FP8 tensors are followed by their scales."""
    for name, tensor in tensors:
        if not is_quantized(name, tensor.ndim):
            yield name, tensor
            continue
        weight, scale = quantize(tensor, layout)
        yield name, weight
        yield name.removesuffix("weight") + layout.scale_suffix, scale


def quantize(tensor: torch.Tensor, layout: Fp8Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 values and float32 scales of a matrix."""
    wide = tensor.detach().float()
    scale = _scale(_largest(wide, layout))
    values = (wide / _spread(scale, layout, wide.shape)).clamp(-_LARGEST, _LARGEST).to(FP8)
    return values, scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, layout: Fp8Format) -> torch.Tensor:
    """Return the float32 matrix of FP8 values and their scales."""
    return weight.float() * _spread(scale.float(), layout, weight.shape)


def format_of(config: dict[str, Any]) -> Fp8Format | None:
    """Return the layout that a Hugging Face config.json declares; None without FP8 weights."""
    declared = config.get("quantization_config") or {}
    method = declared.get("quant_method")
    if method == "fp8":
        block = declared.get("weight_block_size")
        if block:
            return Fp8Format(strategy="block", block=(block[0], block[1]))
        return Fp8Format(strategy="tensor")
    if method == "compressed-tensors":
        weights = [group["weights"] for group in declared["config_groups"].values()]
        if all(w["type"] == "float" and w["num_bits"] == 8 for w in weights):
            return Fp8Format(strategy=weights[0]["strategy"])
    return None


def declaration(layout: Fp8Format, kept_modules: list[str]) -> dict[str, Any]:
    """Return `quantization_config` for config.json; `kept_modules` are linear layers not in FP8."""
    if layout.strategy == "channel":
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True}
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": kept_modules,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**weights, "dynamic": False},
                    "input_activations": {**activations, "dynamic": True},
                    "output_activations": None,
                }
            },
        }
    block = {"weight_block_size": list(layout.block)} if layout.strategy == "block" else {}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": kept_modules,
        **block,
    }


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


def _spread(scale: torch.Tensor, layout: Fp8Format, shape: torch.Size) -> torch.Tensor:
    """Expand scales to one per element."""
    if layout.strategy != "block":
        return scale
    rows, columns = layout.block
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: shape[0], : shape[1]]
