"""The deadline of each phase (--phase-timeout-minutes), and which process is late when it passes.

Ranks 0 to 3, of which 3 sleeps in a hook, with TP groups {0,1} {2,3} and DP groups {0,2} {1,3}:

    group {2,3}: rank 2 has begun 8 collectives, rank 3 only 7      2 waits for 3
    group {0,2}: rank 0 has begun 5, rank 2 only 4                  0 waits for 2

Another rank waits for rank 3, which waits for none: rank 3 is late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slime.config.arguments import Args
from slime.config.flags.run import phase_timeouts
from slime.diagnosis.process_status import ProcessStatus

_COLLECTIVES = ("torch/distributed/", "megatron/core/tensor_parallel/mappings")


@dataclass(kw_only=True, frozen=True)
class MemberStatus:
    """The status of a process of the run, or a sentence with the reason why it is unknown."""

    label: str  # "trainer rank 2"
    place: str  # "pid 4711 on 10.0.0.2"
    status: ProcessStatus | str
    rank: int | None = None  # of a trainer's process
    failed: str = ""  # the error its call ended with, if it has ended


def late_members(members: list[MemberStatus]) -> list[MemberStatus]:
    """Return the processes that all others wait for: without a status, else behind in a collective."""
    unknown = [member for member in members if isinstance(member.status, str)]
    if unknown:
        return unknown
    ranks = [member for member in members if member.rank is not None]
    waits = _waits_for(ranks)
    awaited = set().union(*waits.values()) if waits else set()
    late = [member for member in ranks if member.rank in awaited and not waits[member.rank]]
    if late:
        return late
    busy = [member for member in ranks if not member.failed and _status(member).work]
    elsewhere = [member for member in busy if not _in_collective(member)]
    return elsewhere if len(elsewhere) < len(busy) else []


def describe(members: list[MemberStatus]) -> str:
    """Return phase, call and stack of every process; last, the late processes."""
    blocks = [_block(member) for member in members]
    late = late_members(members)
    if late:
        names = ", ".join(f"{member.label} ({member.place})" for member in late)
        blocks.append(f"The others wait for {names}.")
    return "\n".join(blocks)


def _block(member: MemberStatus) -> str:
    head = f"{member.label} ({member.place})"
    if isinstance(member.status, str):
        return f"{head} {member.status}"
    if member.failed:
        return f"{head} failed: {member.failed}"
    if not member.status.work:
        return f"{head} is idle"
    lines = []
    for thread in member.status.work:
        phase, seconds = thread.phases[-1]
        nested = " > ".join(name for name, _ in thread.phases)
        lines.append(f"{head} has been in {phase} for {seconds:.0f} s ({nested})")
        lines += [f"    {line}" for line in thread.stack]
    return "\n".join(lines)


def _waits_for(ranks: list[MemberStatus]) -> dict[int | None, set[int]]:
    """Return for each rank the ranks that have begun fewer collectives in a common group."""
    counts: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for member in ranks:
        assert member.rank is not None
        for group in _status(member).groups:
            counts.setdefault((group.name, tuple(group.ranks)), {})[member.rank] = group.count
    waits: dict[int | None, set[int]] = {member.rank: set() for member in ranks}
    for begun in counts.values():
        for rank, count in begun.items():
            waits[rank] |= {other for other, number in begun.items() if number < count}
    return waits


def _in_collective(member: MemberStatus) -> bool:
    innermost = [line for thread in _status(member).work for line in thread.stack[-3:]]
    return any(part in line for line in innermost for part in _COLLECTIVES)


def _status(member: MemberStatus) -> ProcessStatus:
    assert not isinstance(member.status, str)
    return member.status


class PhaseDeadline:
    """The current phase, its start and its timeout."""

    def __init__(self, args: Args):
        self.limits = phase_timeouts(args.phase_timeout_minutes)  # seconds, by phase
        self.phase: str | None = None
        self._began = 0.0

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Start the timeout of a phase; a nested phase counts as a part of the outer one."""
        if self.phase is not None or name not in self.limits:
            yield
            return
        self.phase, self._began = name, time.monotonic()
        try:
            yield
        finally:
            self.phase = None

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """Return the seconds until the phase is overdue; infinity without one."""
        if self.phase is None:
            return float("inf")
        return max(0.0, self.limits[self.phase] - self.elapsed_s())
