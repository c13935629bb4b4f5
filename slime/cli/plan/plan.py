"""The plan of a configuration: layout, batches, memory in every phase, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from slime.backends.model_size.count_model import CountRequest, count_models
from slime.backends.model_size.rank_model import ModelCount, RankModel
from slime.cli.plan.engine_memory import Engine, KVCache
from slime.cli.plan.host_memory import Host
from slime.cli.plan.memory import GIB, HostMemory, Item, Phase, total
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
# Fragmentation keeps the allocator from using the last tenth.
_COMFORTABLE = 0.9
_Items = Callable[[RankModel], list[Item]]


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


def make_plans(many: list[Args], machine: Machine) -> list[Plan | UserError]:
    """Plan several configurations; one process counts the parameters of all their models."""
    requests = [_request(args) for args in many]
    counts = count_models(requests)
    return [
        count if isinstance(count, UserError) else plan_from_count(args, count, machine)
        for args, count in zip(many, counts, strict=True)
    ]


def plan_from_count(args: Args, count: ModelCount, machine: Machine) -> Plan:
    shape, layout = read_shape(args.hf_checkpoint), cluster_layout(args)
    batches = batches_of(args, layout.sizes, shape)
    trainer = Trainer(args=args, shape=shape, sizes=layout.sizes, batches=batches, count=count)
    engine = None
    if args.rollout_num_gpus and not args.rollout_external:
        engine = Engine(args=args, shape=shape, whole=count.whole, capacity=machine.gpu_bytes)
    return Plan(
        args=args,
        shape=shape,
        count=count,
        layout=layout,
        batches=batches,
        phases=phases_of(args, trainer, engine),
        host=Host(args=args, trainer=trainer, engine=engine, layout=layout).fullest(),
        cache=engine.cache() if engine else None,
        capacity=machine.gpu_bytes,
        capacity_source=machine.source,
        host_capacity=machine.host_bytes,
    )


def _request(args: Args) -> CountRequest:
    sizes = cluster_layout(args).sizes
    ranks = stage_ranks(sizes) if args.train_backend == "megatron" else [0]
    return CountRequest(args=args, ranks=ranks, world_size=sizes.world)


def with_advice(plan: Plan, advice: list[str]) -> Plan:
    return replace(plan, advice=advice)


def phases_of(args: Args, trainer: Trainer, engine: Engine | None) -> list[Phase]:
    shared = engine if args.colocate else None
    phases = [
        _trainer_phase("training", trainer.resident, trainer.training, trainer, shared),
        _trainer_phase("log_probs", trainer.between_steps, trainer.log_probs, trainer, shared),
    ]
    if engine is None:
        return phases
    heavy = max(trainer.count.ranks, key=lambda rank: total(trainer.between_steps(rank)))
    return [*phases, _rollout(trainer, engine, heavy), _update(trainer, engine, heavy)]


def _trainer_phase(
    name: str, held: _Items, work: _Items, trainer: Trainer, beside: Engine | None
) -> Phase:
    """Return the phase of the rank that needs most memory in it."""
    there = _everything(beside) if beside else []
    stays = beside.overhead() if beside and trainer.args.offload_rollout else there
    phases = []
    for rank in trainer.count.ranks:
        working = [*work(rank), *trainer.overhead()]
        phases.append(
            Phase(
                name=name,
                where="shared" if beside else "trainer",
                rank=rank.rank,
                items=[*held(rank), *working, *stays],
                without_offload=total([*trainer.resident(rank), *working, *there]),
            )
        )
    return max(phases, key=lambda phase: phase.total)


def _rollout(trainer: Trainer, engine: Engine, heavy: RankModel) -> Phase:
    items = _everything(engine)
    if not trainer.args.colocate:
        return Phase(
            name="rollout", where="engine", rank=0, items=items, without_offload=total(items)
        )
    resident = trainer.resident(heavy)
    awake = [] if trainer.args.offload_train else resident
    items += [*awake, *trainer.overhead()]
    apart = total(resident) - total(awake)
    return Phase(
        name="rollout",
        where="shared",
        rank=heavy.rank,
        items=items,
        without_offload=total(items) + apart,
    )


def _update(trainer: Trainer, engine: Engine, heavy: RankModel) -> Phase:
    """Return the update phase; an offloaded engine has weights only, its KV cache comes after."""
    work = [*trainer.update(), *trainer.overhead()]
    items = [*trainer.between_steps(heavy), *work]
    awake = [*trainer.resident(heavy), *work]
    if not trainer.args.colocate:
        return Phase(
            name="weight_update",
            where="trainer",
            rank=heavy.rank,
            items=items,
            without_offload=total(awake),
        )
    everything = _everything(engine)
    there = everything
    if trainer.args.offload_rollout:
        weights = [item for item in engine.static() if item.name == "engine weights"]
        there = [*weights, *engine.overhead()]
    return Phase(
        name="weight_update",
        where="shared",
        rank=heavy.rank,
        items=[*items, *there],
        without_offload=total([*awake, *everything]),
    )


def _everything(engine: Engine) -> list[Item]:
    return [*engine.static(), *engine.working(), *engine.overhead()]
