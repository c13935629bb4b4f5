"""Find the flag that would help most, by planning again with each candidate changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.cli.plan.memory import GIB
from slime.cli.plan.plan import Machine, Plan, plan_from_count
from slime.config.arguments import Args
from slime.config.flags.spec import option_of

# Returns the flags to change. The model on each rank stays the same and is not counted again.
Change = Callable[[Args], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Advice:
    flags: str
    saves: int  # bytes of the fullest phase
    fits: bool

    def __str__(self) -> str:
        what = "fits" if self.fits else "still does not fit"
        return f"{self.flags} would save {self.saves / GIB:.1f} GiB and it {what}"


def find_advice(plan: Plan, machine: Machine) -> list[Advice]:
    """Return changes, best first: those that make it fit, then those that save most."""
    found = []
    for change in _CHANGES:
        values = change(plan.args)
        if values is None:
            continue
        other = plan_from_count(plan.args.replace(**values), plan.count, machine)
        saves = plan.fullest.total - other.fullest.total
        fits = other.verdict != "does not fit"
        if saves > 0 or (fits and plan.verdict == "does not fit"):
            found.append(Advice(flags=_spell(values), saves=max(saves, 0), fits=fits))
    return sorted(found, key=lambda advice: (not advice.fits, -advice.saves))


def _spell(values: dict[str, Any]) -> str:
    words = []
    for name, value in values.items():
        option = option_of(name)
        if value is not False:
            words.append(option if value is True else f"{option} {value}")
    return " ".join(words)


def _full_recompute(args: Args) -> dict[str, Any] | None:
    if args.train_backend == "fsdp":
        return None if args.gradient_checkpointing else {"gradient_checkpointing": True}
    if args.recompute_granularity == "full":
        return None
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _cpu_adam(args: Args) -> dict[str, Any] | None:
    if args.optimizer != "adam":
        return None
    if args.train_backend == "fsdp":
        return None if args.fsdp_cpu_offload else {"fsdp_cpu_offload": True}
    if args.optimizer_cpu_offload and args.use_precision_aware_optimizer:
        return None
    return {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}


def _fewer_tokens(args: Args) -> dict[str, Any] | None:
    budget = args.max_tokens_per_gpu or 0
    if args.use_dynamic_batch_size and budget > 1024:
        half = budget // 2
        return {"max_tokens_per_gpu": half, "log_probs_max_tokens_per_gpu": half}
    if args.micro_batch_size > 1:
        return {"micro_batch_size": args.micro_batch_size // 2}
    return None


def _smaller_fraction(args: Args) -> dict[str, Any] | None:
    fraction = round((args.sglang_mem_fraction_static or 0.85) - 0.1, 2)
    return {"sglang_mem_fraction_static": fraction} if fraction >= 0.3 else None


def _larger_fraction(args: Args) -> dict[str, Any] | None:
    fraction = round((args.sglang_mem_fraction_static or 0.85) + 0.1, 2)
    return {"sglang_mem_fraction_static": fraction} if fraction <= 0.95 else None


def _offload(args: Args) -> dict[str, Any] | None:
    if not args.colocate or (args.offload_train and args.offload_rollout):
        return None
    return {"offload_train": True, "offload_rollout": True}


def _larger_engine(args: Args) -> dict[str, Any] | None:
    size = args.rollout_num_gpus_per_engine * 2
    if args.rollout_engine != "sglang" or not size or args.rollout_num_gpus % size:
        return None
    return {"rollout_num_gpus_per_engine": size}


_CHANGES: tuple[Change, ...] = (
    _full_recompute,
    _cpu_adam,
    _fewer_tokens,
    _smaller_fraction,
    _larger_fraction,
    _offload,
    _larger_engine,
)
