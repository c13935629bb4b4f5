"""The engines of a run by model and group: those of --sglang-config, or one group of equal engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from slime.config.flags.draft import Draft
from slime.config.lora import served_adapter
from slime.core.errors import ConfigError

if TYPE_CHECKING:
    from slime.config.arguments import Args

WorkerType = Literal["regular", "prefill", "decode", "placeholder"]
DEFAULT_MODEL = "default"  # the name of the one model of a run without --sglang-config


@dataclass(frozen=True, kw_only=True)
class ServerGroup:
    """Equal engines of one model; `overrides` are options of SGLang's server by their --sglang- names."""

    worker_type: WorkerType
    num_gpus: int
    num_gpus_per_engine: int | None = None  # default: the model's
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        return self.num_gpus // (self.num_gpus_per_engine or 1)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model and its groups; a frozen one (`update_weights` False) keeps the weights of `model_path`."""

    name: str
    model_path: str
    update_weights: bool
    groups: tuple[ServerGroup, ...]

    @property
    def split(self) -> bool:
        """Return whether prefill and decode have engines of their own."""
        return any(group.worker_type in ("prefill", "decode") for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine: its model, its GPUs counted from the first rollout GPU, and the arguments it starts with."""

    model: str
    update_weights: bool
    worker_type: WorkerType
    gpus: range
    args: Args


def models_of(args: Args) -> list[ServedModel]:
    """Return the models of --sglang-config, or the one that is trained."""
    if args.engine_models:
        return args.engine_models
    group = ServerGroup(
        worker_type="regular",
        num_gpus=args.rollout_num_gpus,
        num_gpus_per_engine=args.rollout_num_gpus_per_engine,
    )
    return [
        ServedModel(
            name=DEFAULT_MODEL,
            model_path=args.hf_checkpoint,
            update_weights=True,
            groups=(group,),
        )
    ]


def default_model(args: Args) -> ServedModel:
    """Return the model that generates unless a hook names another: the first one that receives weights."""
    return next(model for model, _ in serving_groups(models_of(args)) if model.update_weights)


def engines_of(args: Args) -> list[EngineSpec]:
    """Return every engine of the run in the order of its GPUs."""
    ranges = gpu_ranges(args.engine_models, args.rollout_num_gpus, args.rollout_num_gpus_per_engine)
    groups = [(m, g) for m, g in serving_groups(models_of(args)) for _ in range(g.num_engines)]
    return [
        EngineSpec(
            model=model.name,
            update_weights=model.update_weights,
            worker_type=group.worker_type,
            gpus=gpus,
            args=_args_of(args, model, group, gpus) if args.engine_models else args,
        )
        for (model, group), gpus in zip(groups, ranges, strict=True)
    ]


def _args_of(args: Args, model: ServedModel, group: ServerGroup, gpus: range) -> Args:
    values = {
        **_lora_values(args, model),
        **_values(model, group),
        **_offload_values(args, model, gpus),
    }
    return args.replace(**values)


def _offload_values(args: Args, model: ServedModel, gpus: range) -> dict[str, Any]:
    training = args.num_training_gpus
    if args.colocate and gpus.start >= training:  # the trainer does not need its memory
        return {"offload_rollout": False}
    if args.offload_rollout and args.rollout_engine == "sglang" and not model.update_weights:
        # SGLang drops released weights, and a frozen model receives no update.
        return {"sglang_enable_weights_cpu_backup": True}
    return {}


def _lora_values(args: Args, model: ServedModel) -> dict[str, Any]:
    """Return the options of a frozen model: it receives no adapter and so has no slots for one."""
    if model.update_weights or served_adapter(args) is None:
        return {}
    options = ("enable_lora", "max_lora_rank", "max_loras_per_batch")
    return {f"sglang_{option}": None for option in options}


def gpu_ranges(models: Sequence[ServedModel], total: int, per_engine: int) -> list[range]:
    """Return the GPUs of each engine, counted from the first rollout GPU."""
    if not models:
        return [range(i, i + per_engine) for i in range(0, total - per_engine + 1, per_engine)]
    ranges, start = [], 0
    for model in models:
        for group in model.groups:
            size = group.num_gpus_per_engine or 1
            if group.worker_type != "placeholder":
                starts = range(start, start + group.num_gpus, size)
                ranges += [range(first, first + size) for first in starts]
            start += group.num_gpus
    return ranges


def group_drafts(draft: Draft) -> Iterator[tuple[str, ServedModel, Draft]]:
    """Yield for each group its location in the config, its model, and the flags its engines start with."""
    option = "--sglang-config" if draft["sglang_config"] else "--prefill-num-servers"
    for model, group in serving_groups(draft["engine_models"]):
        view = draft.view()
        for name, value in _values(model, group).items():
            view.values[name] = value
            view.origins[name] = "config" if name.startswith("sglang_") else "derived"
        yield f"{option}: {model.name}, {group.worker_type}", model, view
        draft.warnings += [text for text in view.warnings if text not in draft.warnings]


@contextmanager
def named(where: str) -> Iterator[None]:
    """Prefix the message of a ConfigError with the location of the value."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def serving_groups(models: Sequence[ServedModel]) -> list[tuple[ServedModel, ServerGroup]]:
    """Return the groups that have engines, with their models."""
    return [(m, g) for m in models for g in m.groups if g.worker_type != "placeholder"]


def _values(model: ServedModel, group: ServerGroup) -> dict[str, Any]:
    """Return the flags in which the engines of a group differ from those of the run."""
    split = group.worker_type in ("prefill", "decode")
    return {
        "hf_checkpoint": model.model_path,
        "rollout_num_gpus_per_engine": group.num_gpus_per_engine,
        **({"sglang_disaggregation_mode": group.worker_type} if split else {}),
        **group.overrides,
    }
