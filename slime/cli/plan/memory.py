"""The memory items of a plan, per phase of a GPU and per machine."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    name: str  # training, log_probs, rollout, weight_update
    where: str  # "trainer", "engine", or "shared" when colocated
    rank: int
    items: list[Item]
    without_offload: int = 0

    @property
    def total(self) -> int:
        return total(self.items)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory of the machine that needs most."""

    node: int
    items: list[Item] = field(default_factory=list)

    @property
    def total(self) -> int:
        return total(self.items)


def total(items: list[Item]) -> int:
    return sum(item.nbytes for item in items)


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.1f}"
