"""PEFT's files: settings that are honoured, names and shapes of tensors, above all those of MoE experts.

Transformers keeps all experts of a layer in two 3-D parameters. PEFT adapts them by `target_parameters`
and nests one wrapper per parameter, so that the inner one is called `base_layer`::

    mlp.experts.gate_up_proj  [E, 2 W, H]     mlp.experts.base_layer.lora_A.weight   [E * r, H]
                                              mlp.experts.base_layer.lora_B.weight   [2 W, r * E]
    mlp.experts.down_proj     [E, H, W]       mlp.experts.lora_A.weight              [E * r, W]
                                              mlp.experts.lora_B.weight              [H, r * E]

Rows of A are sorted by expert, columns of B by rank and then by expert. If only one of the two
parameters has adapters they are called `mlp.experts`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from slime.core.errors import ConfigError

EXPERTS, INNER = "experts", "base_layer"
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # in the order in which PEFT nests them
_PARTS = {
    **{"gate_proj": GATE_UP, "up_proj": GATE_UP, "down_proj": DOWN},
    **{"w1": GATE_UP, "w3": GATE_UP, "w2": DOWN},
}
_ONE_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<expert>[0-9]{1,6})\.(?P<part>\w+)\.weight")
_ALL_EXPERTS = re.compile(rf"(?P<module>.+\.experts)\.({GATE_UP}|{DOWN})")


def is_experts(name: str) -> bool:
    """Return whether this is a parameter that holds all experts of a layer."""
    return _ALL_EXPERTS.fullmatch(name) is not None


def expert_shapes(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the parameters with all experts, and their shapes, of a checkpoint with one matrix per expert.

    A checkpoint that holds experts in another way has none.
    """
    found: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        match = _ONE_EXPERT.fullmatch(name)
        if match is None or match["part"] not in _PARTS or len(shape) != 2:
            continue
        leaf = _PARTS[match["part"]]
        rows = shape[0] * (2 if leaf == GATE_UP else 1)
        module = match["module"].replace(".block_sparse_moe.", ".mlp.")  # Mixtral's name
        held = found.setdefault(f"{module}.{leaf}", [0, rows, shape[1]])
        held[0] = max(held[0], int(match["expert"]) + 1)
    return found


def matches_experts(name: str, target: str) -> bool:
    """Return whether a target is the end of a parameter's name, or `experts` for both of a layer."""
    return matches(name, target) or matches(name.rpartition(".")[0], target)


def refuse_experts(targets: Iterable[str], experts: Iterable[str]) -> None:
    """Raise ConfigError if targets could mean these experts, where they cannot have adapters."""
    experts = list(experts)
    for target in targets:
        if experts and (target == "all-linear" or any(matches_experts(n, target) for n in experts)):
            raise ConfigError(
                f"--lora-target-modules {target} includes the experts of a MoE layer, which have adapters "
                "with --train-backend fsdp only: name other modules, such as q_proj o_proj"
            )


def names_experts(target: str) -> bool:
    """Return whether a target can only mean parameters of experts."""
    return any(matches(target, name) for name in (EXPERTS, GATE_UP, f"{EXPERTS}.{DOWN}"))


def is_peft_experts(module: str) -> bool:
    """Return whether this is the name of experts in PEFT's files."""
    return matches(module, EXPERTS) or matches(module, f"{EXPERTS}.{INNER}")


def peft_modules(modules: Iterable[str]) -> dict[str, str]:
    """Return the name in PEFT's files of every adapted module, in order: most keep theirs."""
    modules = list(modules)
    both = {m.rpartition(".")[0] for m in modules if is_experts(m) and m.endswith("." + DOWN)}
    names = {}
    for module in modules:
        owner, _, leaf = module.rpartition(".")
        inner = leaf == GATE_UP and owner in both
        names[module] = (f"{owner}.{INNER}" if inner else owner) if is_experts(module) else module
    return names


def bound_modules(modules: Iterable[str], parameters: Sequence[str]) -> dict[str, str]:
    """Return what each module of PEFT's file adapts, the inverse of `peft_modules`.

    `parameters` are PEFT's `target_parameters`: they tell which one has adapters, if one alone has.
    """
    modules = list(modules)
    both = {m.removesuffix(f".{INNER}") for m in modules if m.endswith(f".{EXPERTS}.{INNER}")}
    bound = {}
    for module in modules:
        if not is_peft_experts(module):
            bound[module] = module
        elif module.endswith(f".{INNER}"):
            bound[module] = f"{module.removesuffix(f'.{INNER}')}.{GATE_UP}"
        else:
            bound[module] = f"{module}.{DOWN if module in both else _only(parameters)}"
    return bound


def _only(parameters: Sequence[str]) -> str:
    leaves = {name.rpartition(".")[2] for name in parameters} & {GATE_UP, DOWN}
    if len(leaves) != 1:
        raise ConfigError(
            "adapters of experts need target_parameters in adapter_config.json that name gate_up_proj, "
            f"down_proj or both, got {list(parameters)}"
        )
    return leaves.pop()


def expert_of(name: str) -> int | None:
    """Return the number of the expert whose weight this is in a checkpoint; None for other tensors."""
    match = _ONE_EXPERT.fullmatch(name)
    return None if match is None else int(match["expert"])


def expert_parameters(modules: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Return PEFT's `target_parameters`, of names in its files and of the targets that chose them."""
    modules = list(modules)
    if any(module.endswith(f".{EXPERTS}.{INNER}") for module in modules):
        return [f"{EXPERTS}.{GATE_UP}", f"{EXPERTS}.{DOWN}"]
    if not any(module.endswith(f".{EXPERTS}") for module in modules):
        return []
    names = [f"{EXPERTS}.{leaf}" for leaf in (GATE_UP, DOWN)]
    return [n for n in names if any(_related(n, target) for target in targets)]


def _related(name: str, target: str) -> bool:
    """Return whether one of them is the end of the other: mlp.experts.down_proj, or down_proj."""
    return matches(name, target) or matches(target, name)


def peft_shapes(shape: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """Return the shapes of A and B in PEFT's files, of a weight [out, in] or of all experts [E, out, in]."""
    *experts, rows, columns = shape
    total = rank * (experts[0] if experts else 1)
    return [total, columns], [rows, total]


def matches(name: str, target: str) -> bool:
    """Return whether a target is this name or the end of it, as in PEFT."""
    return name == target or name.endswith("." + target)


def ends_of(modules: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in modules}


# ---- adapter_config.json

# Fields of adapter_config.json that change nothing about trained adapters, or that are read.
_KNOWN_FIELDS = {
    "peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "target_parameters",
    "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config",
}  # fmt: skip
_PLAIN_INITS = (True, False, "gaussian", "orthogonal")  # others change the base weights


def refuse_other_kinds(kind: str, fields: dict[str, Any], modules: list[str], where: str) -> None:
    """Raise ConfigError for settings of adapter_config.json that change what an adapter computes."""
    if kind != "LORA":
        raise ConfigError(f"{where} is of type {kind}: only LORA is honoured")
    init = fields.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise ConfigError(
            f"{where}: init_lora_weights {init} changes the base weights: not honoured"
        )
    for name, value in fields.items():
        if name in ("rank_pattern", "alpha_pattern") and isinstance(value, dict):
            # PEFT writes patterns for fused experts also where these have no adapters.
            value = [key for key in value if any(_matches_pattern(key, m) for m in modules)]
        plain = not value or (name == "bias" and value == "none") or name == "init_lora_weights"
        if not plain and name not in _KNOWN_FIELDS:
            raise ConfigError(f"{where}: {name} {value} is not honoured: only plain LoRA is")


def _matches_pattern(pattern: str, name: str) -> bool:
    """As PEFT matches the keys of rank_pattern. The file is untrusted: only plain wildcards count."""
    plain = re.fullmatch(r"(\.\*\\?\.)?([\w.]+)", pattern)
    return plain is None or matches(name, plain[2])


def above_zero(name: str, value: float) -> Any:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0, not {value}")
    return value


def checked_targets(targets: object) -> Any:
    if not isinstance(targets, str) and not (
        isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    ):
        raise ValueError(f"target_modules must be names, not {targets!r}")
    return targets
