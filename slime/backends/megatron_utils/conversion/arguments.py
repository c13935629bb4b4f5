"""The flags of a conversion: MODEL_ARGS, --hf-checkpoint, --save, and parallel sizes if one wants to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.config.arguments import Args
from slime.config.checks.megatron_support import check_megatron_flags
from slime.config.flags.draft import Draft, Origin
from slime.config.flags.parser import read_command_line
from slime.config.flags.registry import all_flags
from slime.core.errors import ConfigError

_OWN = ("hf_checkpoint", "save", "bf16", "fp32", "seed", "distributed_timeout_minutes")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_LAYOUT = (
    *_SIZES,
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def conversion_args(argv: list[str]) -> Args:
    """ConfigError for a flag that means nothing here, and where a folder is missing."""
    given = read_command_line(argv)
    flags = all_flags()
    for name in given:
        if name not in _OWN and flags[name].family != "megatron":
            raise ConfigError(
                f"{flags[name].option} means nothing in a conversion: give MODEL_ARGS, "
                "--hf-checkpoint and --save"
            )
    _check_folders(given)
    origins: dict[str, Origin] = dict.fromkeys(given, "command line")
    draft = Draft({"train_backend": "megatron", **given}, origins, gpus=0)
    check_megatron_flags(draft)
    draft.derive_if_unset("context_parallel_size", 1)
    draft.derive("precision", "fp32")  # until the checkpoint's is known
    return Args(draft.values, draft.origins)


def has_layout(args: Args) -> bool:
    """Whether the user says how to spread the model."""
    return any(args.origin(name) != "default" for name in _LAYOUT)


def with_layout(args: Args, dtype: str, layout: str | None, world_size: int) -> Args:
    """The user's sizes, or one pipeline over the ranks; `layout` in Megatron's letters."""
    stages = layout.count("|") + 1 if layout else 1
    values: dict[str, Any] = {
        "tensor_model_parallel_size": args.tensor_model_parallel_size or 1,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size or stages,
        "expert_model_parallel_size": args.expert_model_parallel_size or 1,
        "precision": "bf16" if args.bf16 else "fp32" if args.fp32 else dtype,
    }
    tensor = values["tensor_model_parallel_size"]
    values["expert_tensor_parallel_size"] = args.expert_tensor_parallel_size or tensor
    if layout and stages > 1:
        values["pipeline_model_parallel_layout"] = layout
    each = tensor * values["pipeline_model_parallel_size"]
    if world_size % each:
        raise ConfigError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size "
            f"{values['pipeline_model_parallel_size']} = {each} does not divide the {world_size} "
            "processes: remove them, and the model is spread by itself"
        )
    return args.replace(**values)


def _check_folders(given: dict[str, Any]) -> None:
    for name in ("hf_checkpoint", "save"):
        if not given.get(name):
            raise ConfigError(f"{all_flags()[name].option} is missing")
    config = Path(given["hf_checkpoint"]) / "config.json"
    if not config.is_file():
        raise ConfigError(f"--hf-checkpoint: {config} does not exist")
