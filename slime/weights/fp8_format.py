"""What a checkpoint in FP8 declares: the layout of its scales, and which tensors are in FP8."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from slime.config.checks.file_checks import weight_names
from slime.core.errors import UserError

Strategy = Literal["block", "channel", "tensor"]
ScaleFormat = Literal["ue8m0"]
Choice = Callable[[str, int], bool]  # whether the tensor of this name and rank is in FP8
_MAX_WILDCARDS = 8
_MAX_PATTERN = 200  # characters

# Never quantized: small, or too sensitive. The router of a MoE layer is called gate or router.
_KEPT = (
    "embed",
    "lm_head",
    "norm",
    "router",
    ".gate.",
    "shared_expert_gate",
    "eh_proj",
    "input_proj",
    "mtp.fc",
    "linear_attn.in_proj_a.",  # a row per head
    "linear_attn.in_proj_b.",
    "linear_attn.in_proj_ba.",
    "shared_head",
    "visual",
)


@dataclass(kw_only=True, frozen=True)
class Fp8Format:
    strategy: Strategy
    block: tuple[int, int] = (128, 128)
    scale_fmt: ScaleFormat | None = None  # ue8m0: scales are powers of two, as Blackwell multiplies
    compressed: bool = False  # blocks of compressed-tensors: scales have another name

    @property
    def scale_suffix(self) -> str:
        inverse = self.strategy == "block" and not self.compressed
        return "weight_scale_inv" if inverse else "weight_scale"

    def scale_name(self, weight: str) -> str:
        """Return "X.weight_scale_inv" or "X.weight_scale" for "X.weight"."""
        return weight.removesuffix("weight") + self.scale_suffix


def is_quantized(name: str, num_dimensions: int) -> bool:
    """Return whether a conversion stores the tensor of this Hugging Face name in FP8."""
    return name.endswith(".weight") and num_dimensions == 2 and not any(k in name for k in _KEPT)


def quantized_in(folder: Path, config: dict[str, Any], layout: Fp8Format) -> Choice:
    """Return which tensors a checkpoint holds in FP8: those of its files that have scales.

    For names that its files lack, and without files, `modules_to_not_convert` of config.json decides.
    """
    stored = frozenset(weight_names(str(folder)))
    kept = _kept_modules(config["quantization_config"])

    def choose(name: str, num_dimensions: int) -> bool:
        if name in stored:
            return layout.scale_name(name) in stored
        return is_quantized(name, num_dimensions) and not kept(name.removesuffix(".weight"))

    return choose


def _kept_modules(declared: dict[str, Any]) -> Callable[[str], bool]:
    """Return whether config.json excludes a module from FP8, by its name, a part of it, or "re:..."."""
    lists = (declared.get(key) for key in ("modules_to_not_convert", "ignored_layers", "ignore"))
    excluded = [str(entry) for entries in lists for entry in entries or ()]
    patterns = [e.removeprefix("re:") for e in excluded if e.startswith("re:")]
    parts = [f".{entry}." for entry in excluded if not entry.startswith("re:")]
    return lambda module: (
        any(part in f".{module}." for part in parts)
        or any(fnmatchcase(module, _as_wildcards(pattern)) for pattern in patterns)
    )


def _as_wildcards(pattern: str) -> str:
    """Return a pattern of names, "." and ".*" as wildcards: an untrusted regular expression may never end."""
    open_end = "" if pattern.endswith("$") else "*"
    body = pattern.removeprefix("^").removesuffix("$")
    text = body.replace(".*", "*").replace("\\.", "\0").replace(".", "?").replace("\0", ".")
    known = len(body) <= _MAX_PATTERN and re.fullmatch(r"(?:\.\*|\\\.|[\w.-])+", body)
    if not known or text.count("*") > _MAX_WILDCARDS:
        raise UserError(
            f"quantization_config of config.json excludes modules by the pattern {pattern[:80]!r}, of which "
            "slime reads names, . and .* only: list the modules by name"
        )
    return text + open_end


def format_of(config: dict[str, Any]) -> Fp8Format | None:
    """Return the layout that a Hugging Face config.json declares; None without FP8 weights."""
    declared = config.get("quantization_config") or {}
    method = declared.get("quant_method")
    if method == "fp8":
        block = declared.get("weight_block_size")
        if block:
            powers = declared.get("scale_fmt") == "ue8m0"
            return Fp8Format(
                strategy="block", block=(block[0], block[1]), scale_fmt="ue8m0" if powers else None
            )
        return Fp8Format(strategy="tensor")
    if method == "compressed-tensors":
        groups = declared.get("config_groups") or {}
        weights = [group.get("weights") or {} for group in groups.values()]
        if weights and all((w.get("type"), w.get("num_bits")) == ("float", 8) for w in weights):
            return _compressed_format(weights)
    return None


def _compressed_format(weights: list[dict[str, Any]]) -> Fp8Format | None:
    """Return the layout of compressed-tensors; None for groups of columns or several layouts."""
    strategies = {group.get("strategy") for group in weights}
    blocks = {tuple(group.get("block_structure") or ()) for group in weights}
    strategy: Any = strategies.pop()
    if strategies or strategy not in get_args(Strategy):
        return None
    if strategy != "block":
        return Fp8Format(strategy=strategy)
    block = blocks.pop()
    if blocks or len(block) != 2:
        return None
    return Fp8Format(strategy="block", block=block, compressed=True)


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
    scale_fmt = {"scale_fmt": layout.scale_fmt} if layout.scale_fmt else {}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": kept_modules,
        **block,
        **scale_fmt,
    }


def refuse_unreadable(folder: Path, config: dict[str, Any]) -> None:
    """Raise UserError that names the format of quantized weights other than FP8 and MXFP4."""
    declared = config.get("quantization_config") or {}
    method = declared.get("quant_method")
    if method in (None, "fp8", "mxfp4") or format_of(config) is not None:
        return
    raise UserError(
        f"{folder} holds weights in {_quantization_name(declared)}, which slime does not read: give the "
        "bfloat16 or FP8 checkpoint that they were quantized from"
    )


def _quantization_name(declared: dict[str, Any]) -> str:
    """Return "INT4 (AWQ)", "INT4 (pack-quantized of compressed-tensors)", ..."""
    method = str(declared["quant_method"])
    if method != "compressed-tensors":
        bits = declared.get("bits") or declared.get("w_bit")
        return f"INT{bits} ({method.upper()})" if bits else method
    groups = list((declared.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if groups else {}
    kind = "FP" if weights.get("type") == "float" else "INT"
    layout = declared.get("format") or (groups[0].get("format") if groups else None)
    scales = f", scales per {weights['strategy']}" if kind == "FP" and "strategy" in weights else ""
    return f"{kind}{weights.get('num_bits', '')} ({layout or 'unknown format'} of {method}{scales})"
