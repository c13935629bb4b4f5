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

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from slime.config.checks.file_checks import file_shapes, weight_shapes
from slime.config.checks.model_types import in_tower
from slime.core.errors import ConfigError

EXPERTS, INNER = "experts", "base_layer"
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # in the order in which PEFT nests them
_PARTS = {
    **{"gate_proj": GATE_UP, "up_proj": GATE_UP, "down_proj": DOWN},
    **{"w1": GATE_UP, "w3": GATE_UP, "w2": DOWN},
}
_ONE_EXPERT = re.compile(r"(?P<module>.+\.experts)\.(?P<expert>[0-9]{1,6})\.(?P<part>\w+)\.weight")
_ALL_EXPERTS = re.compile(rf"(?P<module>.+\.experts)\.({GATE_UP}|{DOWN})")


@lru_cache(maxsize=1 << 16)  # called for every module of an adapter in every update
def is_experts(name: str) -> bool:
    """Return whether this is a parameter that holds all experts of a layer."""
    return _ALL_EXPERTS.fullmatch(name) is not None


def expert_shapes(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the parameters with all experts of a checkpoint, and their shapes [E, out, in].

    A checkpoint has one matrix per expert, or these parameters themselves. One with
    biases or transposed experts has none.
    """
    found: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        if is_experts(name) and _is_plain(name, shape, shapes):
            found[name] = shape
        match = _ONE_EXPERT.fullmatch(name)
        if match is None or match["part"] not in _PARTS or len(shape) != 2:
            continue
        leaf = _PARTS[match["part"]]
        rows = shape[0] * (2 if leaf == GATE_UP else 1)
        module = match["module"].replace(".block_sparse_moe.", ".mlp.")  # Mixtral's name
        held = found.setdefault(f"{module}.{leaf}", [0, rows, shape[1]])
        held[0] = max(held[0], int(match["expert"]) + 1)
    return found


def _is_plain(name: str, shape: list[int], shapes: dict[str, list[int]]) -> bool:
    """Return whether fused experts are [E, 2 W, H] or [E, H, W] without biases."""
    hidden = next((s[1] for n, s in shapes.items() if n.endswith("embed_tokens.weight")), None)
    facing = shape[2 if name.endswith(GATE_UP) else 1] if len(shape) == 3 else None
    return facing is not None and facing == hidden and f"{name}_bias" not in shapes


def matches_experts(name: str, target: str) -> bool:
    """Return whether a target is the end of a parameter's name, or `experts` for both of a layer."""
    return matches(name, target) or matches(name.rpartition(".")[0], target)


def refuse_gate(targets: Iterable[str], modules: Iterable[str]) -> None:
    """Raise ConfigError if these modules include the gate of a shared expert, which Megatron's layers lack."""
    if any(matches(module, "shared_expert_gate") for module in modules):
        raise ConfigError(
            f"--lora-target-modules {' '.join(targets)} includes shared_expert_gate, which has adapters "
            "with --train-backend fsdp only: name other modules, such as q_proj o_proj experts"
        )


def refuse_fused(targets: Iterable[str], parameters: list[str]) -> None:
    """Raise ConfigError if there are parameters with all experts, which Megatron reads one by one."""
    if parameters:
        raise ConfigError(
            f"--lora-target-modules {' '.join(targets)} includes {parameters[0]}: experts that --hf-checkpoint "
            "holds in one tensor have adapters with --train-backend fsdp only: name other modules, such as q_proj"
        )


def names_experts(target: str) -> bool:
    """Return whether a target means parameters of experts, in a model that has experts."""
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

    `parameters` are PEFT's `target_parameters`: they tell which one has adapters, if only one has.
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

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
_LARGEST_CONFIG = 1 << 20  # bytes
# Fields that change nothing about trained adapters, or that are read.
_KNOWN_FIELDS = {
    "peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version",
    "inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "target_parameters",
    "megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config", "eva_config",
    "exclude_modules", "layers_to_transform", "layers_pattern",
}  # fmt: skip
_SOME_LAYERS = ("exclude_modules", "layers_to_transform", "layers_pattern")
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")  # others change the base weights


def lora_scaling(rank: int, alpha: float, rank_stabilized: bool) -> float:
    """Return the factor of B A x."""
    return alpha / (math.sqrt(rank) if rank_stabilized else rank)


@dataclass(frozen=True, kw_only=True)
class PeftSettings:
    """What adapter_config.json says: with r 8 and lora_alpha 16 an adapter adds 16 / 8 = 2 times B A x."""

    rank: int
    alpha: float
    dropout: float = 0.0
    use_rslora: bool = False  # alpha / sqrt(rank) instead
    # None for a pattern or selected layers: read them from the tensors
    targets: tuple[str, ...] | None = ()
    parameters: tuple[str, ...] = ()  # of experts

    @property
    def scaling(self) -> float:
        return lora_scaling(self.rank, self.alpha, self.use_rslora)

    @property
    def complete(self) -> tuple[str, ...]:
        """Return the names of which every matching module of the model must have matrices."""
        listed = () if self.targets == (ALL_LINEAR,) else self.targets or ()
        return (*listed, *self.parameters)


def read_adapter_config(folder: str | Path) -> object:
    """Return the parsed adapter_config.json of a PEFT folder; raise ConfigError if it cannot be read."""
    file = Path(folder) / CONFIG_FILE
    try:
        if file.stat().st_size > _LARGEST_CONFIG:
            raise ConfigError(f"{file} is larger than {_LARGEST_CONFIG} bytes")
        return json.loads(file.read_text())
    except OSError:
        raise ConfigError(f"{folder} is not a PEFT folder: it has no {CONFIG_FILE}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {str(error)[:200]}") from None


def peft_settings(given: object, modules: Iterable[str] | None = None) -> PeftSettings:
    """Check a parsed adapter_config.json: what changes an adapter's output is honoured or refused by name.

    `modules` are those of its tensors; without them, patterns of ranks are not checked.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"{CONFIG_FILE} cannot be read: it must be a JSON object")
    if given.get("peft_type") != "LORA":
        raise ConfigError(
            f"{CONFIG_FILE} is of type {given.get('peft_type')}: only LORA is honoured"
        )
    parameters = _names(given, "target_parameters")
    _refuse_other_kinds(given, None if modules is None else [*modules, *parameters])
    targets = given.get("target_modules")
    if isinstance(targets, str) and targets == ALL_LINEAR:
        named: tuple[str, ...] | None = (ALL_LINEAR,)
    elif isinstance(targets, str) or any(given.get(name) for name in _SOME_LAYERS):
        named = None
    else:
        named = () if targets is None and parameters else _names(given, "target_modules")
    dropout = given.get("lora_dropout") or 0.0
    return PeftSettings(
        rank=_number(given, "r", int),
        alpha=_number(given, "lora_alpha", int, float),
        dropout=float(dropout) if isinstance(dropout, int | float) else 0.0,
        use_rslora=bool(given.get("use_rslora")),
        targets=named,
        parameters=parameters,
    )


def _refuse_other_kinds(given: dict[str, Any], modules: list[str] | None) -> None:
    init = given.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise ConfigError(
            f"{CONFIG_FILE}: init_lora_weights {init} changes the base weights: not honoured"
        )
    for name, value in given.items():
        if name in ("rank_pattern", "alpha_pattern") and isinstance(value, dict):
            # PEFT writes patterns for fused experts also where these have no adapters.
            value = [k for k in value if any(_matches_pattern(k, m) for m in modules or ())]
        plain = not value or (name == "bias" and value == "none") or name == "init_lora_weights"
        if not plain and name not in _KNOWN_FIELDS:
            raise ConfigError(
                f"{CONFIG_FILE}: {name} {str(value)[:100]} is not honoured: only plain LoRA is"
            )


def _matches_pattern(pattern: str, name: str) -> bool:
    """Match a key of rank_pattern as PEFT does. The file is untrusted: only plain wildcards count."""
    plain = re.fullmatch(r"(\.\*\\?\.)?([\w.]+)", pattern)
    return plain is None or matches(name, plain[2])


def _number(given: dict[str, Any], name: str, *kinds: type) -> Any:
    value = given.get(name)
    if value is None or type(value) not in kinds or not 0 < value < 1e9:  # no NaN, no huge integer
        kind = "an integer" if kinds == (int,) else "a number"
        raise ConfigError(f"{CONFIG_FILE}: {name} must be {kind} above 0, not {str(value)[:40]}")
    return value


def _names(given: dict[str, Any], field: str) -> tuple[str, ...]:
    names = given.get(field, []) if field == "target_modules" else given.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{CONFIG_FILE}: {field} must be a list of names, not {str(names)[:100]}")
    return tuple(names)


# ---- tensors of an adapter and of its base
#
# A vision-language model nests its language half: model.language_model.layers.0 instead of model.layers.0.
# PEFT names adapters after the module that it was given, which may be either of them, so adapters and
# bases are compared by the names of the text model alone.

WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # of a Hugging Face name in adapter_model.safetensors
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"  # after the name of a module
_NESTED = "model.language_model."
_MTP = re.compile(r"mtp\.|model\.mtp_layers\.")  # in front of the layers of a checkpoint
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")


def flat_name(name: str) -> str:
    """Return the name of the same tensor or module in the text model alone."""
    return "model." + name.removeprefix(_NESTED) if name.startswith(_NESTED) else name


def nested_name(name: str) -> str:
    """Return the name of a text model's tensor or module beside a vision tower."""
    return _NESTED + flat_name(name).removeprefix("model.") if name.startswith("model.") else name


def adapter_shapes(
    folder: Path, flag: str = "--lora-adapter-path", *, flat: bool = True
) -> dict[str, list[int]]:
    """Return the shape of every tensor of a PEFT folder, without PEFT's prefix."""
    file = folder / WEIGHTS_FILE
    if not file.exists():
        raise ConfigError(f"{flag}: {folder} is not a PEFT folder: it has no {WEIGHTS_FILE}")
    shapes = {n.removeprefix(PEFT_PREFIX): shape for n, shape in file_shapes(file, flag).items()}
    if tower := next(filter(in_tower, shapes), None):
        raise ConfigError(
            f"{flag}: {folder} adapts the vision tower ({tower}), which has no adapters here: make it with "
            r"exclude_modules=r'.*\.visual\..*' of PEFT's LoraConfig"
        )
    found = {flat_name(name): shape for name, shape in shapes.items()}
    if len(found) < len(shapes):
        twice = next(
            name for name in shapes if flat_name(name) != name and flat_name(name) in shapes
        )
        raise ConfigError(f"{flag}: {folder} has {twice} and {flat_name(twice)}, which are one")
    return found if flat else shapes


def adapter_modules(
    folder: Path, flag: str = "--lora-adapter-path", *, flat: bool = True
) -> list[str]:
    """Return the modules that have adapters in a PEFT folder, from the header of its weights."""
    header = adapter_shapes(folder, flag, flat=flat)
    return sorted({name.removesuffix(LORA_A) for name in header if name.endswith(LORA_A)})


def decoder_shapes(folder: str, flag: str = "--hf-checkpoint") -> dict[str, list[int]]:
    """Return the shapes of a checkpoint's tensors by flat name, without vision tower and MTP layers."""
    config = json.loads((Path(folder) / "config.json").read_text())
    count = (config.get("text_config") or config).get("num_hidden_layers")
    return {
        flat_name(name): shape
        for name, shape in weight_shapes(folder, flag).items()
        if not in_tower(name) and not _is_mtp(flat_name(name), count)
    }


def _is_mtp(name: str, num_layers: object) -> bool:
    """Return whether a tensor is of an MTP layer, some of which are numbered after the last layer."""
    layer = _LAYER.match(name)
    behind = layer is not None and isinstance(num_layers, int) and int(layer[1]) >= num_layers
    return behind or _MTP.match(name) is not None


def linear_modules(shapes: dict[str, list[int]]) -> tuple[list[str], list[str]]:
    """Return the modules with a matrix and the parameters of experts, of the tensors of a checkpoint.

    The trainer itself looks at the modules of the model it has built.
    """
    matrices = [n.removesuffix(".weight") for n, shape in shapes.items() if len(shape) == 2]
    linear = [n for n in matrices if f"{n}.weight" in shapes and "embed" not in n]
    return [n for n in linear if ".experts." not in n], list(expert_shapes(shapes))
