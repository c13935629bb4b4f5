"""The memory items of a plan, and the sum of trainer and engine in each phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime.backends.model_size import RankModel

if TYPE_CHECKING:
    from slime.cli.plan.engine_memory import Engine, PlannedEngine
    from slime.cli.plan.trainer_memory import Trainer

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Item:
    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Memory of one GPU at the peak of a phase.

    `without_offload` is the total if trainer and engine both stayed on the GPU.
    """

    name: str  # training, log_probs, rollout, weight_update, "rollout of judge"
    where: str  # "trainer", "engine", or "shared" when colocated
    rank: int
    items: list[Item]
    without_offload: int = 0

    @property
    def total(self) -> int:
        return total(self.items)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory of the node that needs the most."""

    node: int
    items: list[Item] = field(default_factory=list)

    @property
    def total(self) -> int:
        return total(self.items)


def total(items: list[Item]) -> int:
    return sum(item.nbytes for item in items)


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"


_Items = Callable[[RankModel], list[Item]]


def phases_of(
    trainer: Trainer, policy: PlannedEngine | None, others: Sequence[PlannedEngine] = ()
) -> list[Phase]:
    """Return the phases; `policy` is an engine of the trained model, `others` one of each other group."""
    every = [*([policy] if policy else []), *others]
    beside = [engine.memory for engine in every if engine.colocated]
    phases = [
        _trainer_phase("training", trainer.resident, trainer.training, trainer, beside),
        _trainer_phase("log_probs", trainer.between_steps, trainer.log_probs, trainer, beside),
    ]
    if policy is None:
        return phases
    heavy = max(trainer.count.ranks, key=lambda rank: total(trainer.between_steps(rank)))
    phases += [_rollout("rollout", trainer, policy, heavy), _update(trainer, beside, heavy)]
    return phases + [
        _rollout(f"rollout of {other.title}", trainer, other, heavy) for other in others
    ]


def _trainer_phase(
    name: str, held: _Items, work: _Items, trainer: Trainer, beside: list[Engine]
) -> Phase:
    """Return the phase on the rank that needs the most memory, beside the engine that keeps the most."""
    offload = trainer.args.offload_rollout
    there = _largest([_everything(engine) for engine in beside])
    stays = _largest([engine.overhead() for engine in beside]) if offload else there
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


def _rollout(name: str, trainer: Trainer, engine: PlannedEngine, heavy: RankModel) -> Phase:
    items, offloaded = _everything(engine.memory), 0
    if engine.colocated:
        resident = trainer.resident(heavy)
        if trainer.args.offload_train:
            offloaded, resident = total(resident), []
        items += [*resident, *trainer.overhead()]
    return Phase(
        name=name,
        where="shared" if engine.colocated else "engine",
        rank=heavy.rank if engine.colocated else 0,
        items=items,
        without_offload=total(items) + offloaded,
    )


def _update(trainer: Trainer, beside: list[Engine], heavy: RankModel) -> Phase:
    """Return the update phase, in which offloaded engines, frozen ones too, hold weights and no KV cache yet."""
    work = [*trainer.update(), *trainer.overhead()]
    there = everything = _largest([_everything(engine) for engine in beside])
    if trainer.args.offload_rollout:
        there = _largest([[*engine.static()[:1], *engine.overhead()] for engine in beside])
    return Phase(
        name="weight_update",
        where="shared" if beside else "trainer",
        rank=heavy.rank,
        items=[*trainer.between_steps(heavy), *work, *there],
        without_offload=total([*trainer.resident(heavy), *work, *everything]),
    )


def _largest(choices: list[list[Item]]) -> list[Item]:
    return max(choices, key=total, default=[])


def _everything(engine: Engine) -> list[Item]:
    return [*engine.static(), *engine.working(), *engine.overhead()]
