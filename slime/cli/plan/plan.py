"""The plan of a configuration: layout, batches, memory in every phase, whether it fits, advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from slime.backends.model_size import CountRequest, ModelCount, RankModel, count_models
from slime.cli.plan.activations import layers_line
from slime.cli.plan.engine_memory import KVCache, planned_engines, policy_engine
from slime.cli.plan.host_memory import Host
from slime.cli.plan.lora import AdapterCost, adapter_cost, lora_values, typed_flags, typed_lora
from slime.cli.plan.memory import GIB, HostMemory, Item, Phase, phases_of
from slime.cli.plan.model_shape import Shape, read_shape
from slime.cli.plan.rank_layout import (
    Batches,
    ClusterLayout,
    batches_of,
    cluster_layout,
    stage_ranks,
)
from slime.cli.plan.trainer_memory import Trainer
from slime.config.arguments import Args
from slime.core.errors import UserError

Verdict = Literal["fits", "tight", "does not fit"]
# Fragmentation makes the last tenth unusable for the allocator.
_COMFORTABLE = 0.9


@dataclass(frozen=True, kw_only=True)
class Plan:
    args: Args
    shape: Shape
    count: ModelCount
    layout: ClusterLayout
    batches: Batches
    phases: list[Phase]
    host: HostMemory
    cache: KVCache | None
    capacity: float  # bytes of a GPU
    capacity_source: str
    host_capacity: float | None = None
    advice: list[str] = field(default_factory=list)

    @property
    def adapter(self) -> AdapterCost | None:
        return adapter_cost(self.args, self.count, self.shape.layers)

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def verdict(self) -> Verdict:
        share = self.fullest.total / self.capacity
        if share > 1 or (self.cache is not None and not self.cache.holds_one) or self._host_full():
            return "does not fit"
        return "tight" if share > _COMFORTABLE else "fits"

    @property
    def reason(self) -> str:
        phase, have = self.fullest, f"of {self.capacity / GIB:.0f} GiB"
        if self._host_full():
            assert self.host_capacity is not None
            return (
                f"machine {self.host.node} needs {self.host.total / GIB:.0f} GiB of host memory and "
                f"has {self.host_capacity / GIB:.0f}"
            )
        if self.cache is not None and not self.cache.holds_one and phase.total <= self.capacity:
            return (
                f"the KV cache holds {self.cache.tokens} tokens and one request may need "
                f"{self.cache.longest_request}"
            )
        names = {"log_probs": "log-probs", "weight_update": "the weight update"}
        name = names.get(phase.name, phase.name)
        return f"{name} needs {phase.total / GIB:.1f} GiB {have} on rank {phase.rank}"

    def _host_full(self) -> bool:
        return self.host_capacity is not None and self.host.total > self.host_capacity


@dataclass(frozen=True, kw_only=True)
class Machine:
    gpu_bytes: float
    source: str
    host_bytes: float | None = None


def make_plan(args: Args, machine: Machine) -> Plan:
    """Plan one configuration; raise UserError if its model or layout is refused."""
    plan = make_plans([args], machine)[0]
    if isinstance(plan, UserError):
        raise plan
    return plan


def build_model(args: Args) -> ModelCount:
    """Build the model of a run without weights and count it; raise UserError if it is refused."""
    count = _with_served(count_models([_request(args)])[0], args)
    if isinstance(count, UserError):
        raise count
    return count


def make_plans(many: list[Args], machine: Machine) -> list[Plan | UserError]:
    """Plan several configurations; one process counts the parameters of all their models."""
    requests = [_request(args) for args in many]
    own = zip(count_models(requests), many, strict=True)
    counts = [_with_served(count, args) for count, args in own]
    return [
        count if isinstance(count, UserError) else plan_from_count(args, count, machine)
        for args, count in zip(many, counts, strict=True)
    ]


def plan_from_count(args: Args, count: ModelCount, machine: Machine) -> Plan:
    shape, layout = read_shape(args.hf_checkpoint), cluster_layout(args)
    batches = batches_of(args, layout.sizes, shape)
    trainer = Trainer(args=args, shape=shape, sizes=layout.sizes, batches=batches, count=count)
    engines = planned_engines(args, count, machine.gpu_bytes)
    policy = policy_engine(args, engines)
    groups = {id(other.memory): other for other in engines}
    if policy is not None:
        del groups[id(policy.memory)]
    return Plan(
        args=args,
        shape=shape,
        count=count,
        layout=layout,
        batches=batches,
        phases=phases_of(trainer, policy, list(groups.values())),
        host=Host(args=args, trainer=trainer, engines=engines, layout=layout).fullest(),
        cache=policy.memory.cache() if policy else None,
        capacity=machine.gpu_bytes,
        capacity_source=machine.source,
        host_capacity=machine.host_bytes,
    )


def _with_served(count: ModelCount | UserError, args: Args) -> ModelCount | UserError:
    """Add the sizes of the models of --sglang-config that are not trained."""
    paths = {model.model_path for model in args.engine_models} - {args.hf_checkpoint}
    if isinstance(count, UserError) or not paths:
        return count
    served, models = {}, [args.replace(hf_checkpoint=path) for path in sorted(paths)]
    requests = [CountRequest(args=model, ranks=[], world_size=1) for model in models]
    for path, answer in zip(sorted(paths), count_models(requests), strict=True):
        if isinstance(answer, UserError):
            return answer
        served[path] = answer.whole
    return replace(count, served=served)


def _request(args: Args) -> CountRequest:
    sizes = cluster_layout(args).sizes
    ranks = stage_ranks(sizes) if args.train_backend == "megatron" else [0]
    return CountRequest(args=args, ranks=ranks, world_size=sizes.world)


FULL_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CPU_ADAM: dict[str, Any] = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
# Returns the flags to change. The model on each rank stays the same and is not counted again.
Change = Callable[[Args], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Advice:
    flags: str
    saves: int  # bytes of the fullest phase
    fits: bool

    def __str__(self) -> str:
        what = "fits" if self.fits else "still does not fit"
        return f"{self.flags} would save {self.saves / GIB:.1f} GiB, and the run {what}"


def find_advice(plan: Plan, machine: Machine) -> list[Advice]:
    """Return changes, best first: those that make the run fit, then by the memory they save."""
    found = []
    for change in _CHANGES:
        values = change(plan.args)
        if values is None:
            continue
        other = plan_from_count(plan.args.replace(**values), plan.count, machine)
        saves = plan.fullest.total - other.fullest.total
        fits = other.verdict != "does not fit"
        if saves > 0 or (fits and plan.verdict == "does not fit"):
            flags = " ".join(typed_flags(values))
            found.append(Advice(flags=flags, saves=max(saves, 0), fits=fits))
    if plan.verdict == "does not fit" and not any(advice.fits for advice in found):
        found += _lora_advice(plan, machine)
    return sorted(found, key=lambda advice: (not advice.fits, -advice.saves))


def _lora_advice(plan: Plan, machine: Machine) -> list[Advice]:
    """Propose LoRA if no other change fits and the trainer is FSDP, which supports it for every model."""
    if plan.args.lora_rank or plan.args.train_backend != "fsdp":
        return []
    values = lora_values(plan.args, plan.shape)
    other = make_plans([plan.args.replace(**values)], machine)[0]
    if isinstance(other, UserError):
        return []
    saves, fits = plan.fullest.total - other.fullest.total, other.verdict != "does not fit"
    words = [word for word in typed_lora(values) if not word.startswith("--train-backend")]
    return [Advice(flags=" ".join(words), saves=saves, fits=fits)] if saves > 0 else []


def _full_recompute(args: Args) -> dict[str, Any] | None:
    if args.train_backend == "fsdp":
        return None if args.gradient_checkpointing else {"gradient_checkpointing": True}
    if args.recompute_granularity == "full":
        return None
    return FULL_RECOMPUTE


def _cpu_adam(args: Args) -> dict[str, Any] | None:
    if args.optimizer != "adam":
        return None
    if args.train_backend == "fsdp":
        return None if args.fsdp_cpu_offload else {"fsdp_cpu_offload": True}
    if args.optimizer_cpu_offload and args.use_precision_aware_optimizer:
        return None
    return CPU_ADAM


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
    splits = args.rollout_num_gpus % size == 0 and not args.engine_models
    if args.rollout_engine != "sglang" or not splits:
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


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan with the keys that docs/planning.md documents."""
    layout, megatron = plan.layout, plan.args.train_backend == "megatron"
    return {
        "version": 1,
        "verdict": plan.verdict,
        "reason": plan.reason,
        "advice": plan.advice,
        "model_type": plan.shape.model_type,
        "total_parameters": plan.count.whole.total,
        "gpus": len({*range(layout.sizes.world), *(g for e in layout.engines for g in e.gpus)}),
        "nodes": layout.nodes,
        "gpu_memory_bytes": int(plan.capacity),
        "gpu_memory_source": plan.capacity_source,
        "parallel": layout.sizes.as_dict(),
        "groups": {axis: layout.groups(axis) for axis in ("tp", "pp", "cp", "dp", "ep")},
        "ranks": [asdict(place) for place in layout.ranks],
        "layers": layers_line(plan.args, plan.shape) if megatron else None,
        "engines": [asdict(engine) for engine in layout.engines],
        "batches": asdict(plan.batches),
        "per_rank": [_rank(rank) for rank in plan.count.ranks],
        "memory": [_phase(phase) for phase in plan.phases],
        "kv_cache": asdict(plan.cache) if plan.cache else None,
        "host_memory": {
            "node": plan.host.node,
            "total_bytes": plan.host.total,
            "items": [_item(item) for item in plan.host.items],
        },
        "adapter": asdict(plan.adapter) if plan.adapter else None,
        "warnings": list(plan.args.warnings),
    }


def _rank(rank: RankModel) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "parameters": rank.parameters,
        "expert_parameters": rank.expert_parameters,
        "trained_parameters": rank.trained_parameters,
        "parameter_bytes": rank.weight_bytes,
        "gradient_bytes": rank.gradient_bytes,
        "master_bytes": rank.master_bytes,
        "moment_bytes": rank.moment_bytes,
        "dense_layers": rank.dense_layers,
        "moe_layers": rank.moe_layers,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "where": phase.where,
        "rank": phase.rank,
        "total_bytes": phase.total,
        "without_offload_bytes": phase.without_offload,
        "items": [_item(item) for item in phase.items],
    }


def _item(item: Item) -> dict[str, Any]:
    return {"name": item.name, "bytes": item.nbytes, "note": item.note}
