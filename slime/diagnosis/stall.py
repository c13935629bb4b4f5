"""Who the others wait for, and the whole picture in words; no process is asked here.

Ranks 0 to 3, of which 3 sleeps in a hook, with TP groups {0,1} {2,3} and DP groups {0,2} {1,3}:

    group {2,3}: rank 2 has begun 8 collectives, rank 3 only 7      2 waits for 3
    group {0,2}: rank 0 has begun 5, rank 2 only 4                  0 waits for 2

Rank 3 is waited for and waits for nobody: it is the one.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.diagnosis.process_status import Whereabouts

_OF_COLLECTIVES = ("torch/distributed/", "megatron/core/tensor_parallel/mappings")


@dataclass(kw_only=True, frozen=True)
class Answer:
    """`said` is a sentence where the process could not answer. `rank`: of a trainer's process."""

    label: str  # "trainer rank 2"
    place: str  # "pid 4711 on 10.0.0.2"
    said: Whereabouts | str
    rank: int | None = None
    failed: str = ""  # what its call ended with, where it has ended


def waited_for(answers: list[Answer]) -> list[Answer]:
    """Those that keep the others: who cannot answer, else who is behind in a collective."""
    ranks = [answer for answer in answers if answer.rank is not None]
    silent = [answer for answer in answers if isinstance(answer.said, str)]
    if silent:
        return silent
    waits = _waits_on(ranks)
    awaited = set().union(*waits.values()) if waits else set()
    late = [answer for answer in ranks if answer.rank in awaited and not waits[answer.rank]]
    if late:
        return late
    busy = [answer for answer in ranks if not answer.failed and answer.said.work]  # type: ignore[union-attr]
    elsewhere = [answer for answer in busy if not _in_collective(answer)]
    return elsewhere if len(elsewhere) < len(busy) else []


def describe(answers: list[Answer]) -> str:
    """Per process its phase, its call and its stack; last, who the others wait for."""
    blocks = [_block(answer) for answer in answers]
    late = waited_for(answers)
    if late:
        names = ", ".join(f"{answer.label} ({answer.place})" for answer in late)
        blocks.append(f"The others wait for {names}.")
    return "\n".join(blocks)


def _block(answer: Answer) -> str:
    head = f"{answer.label} ({answer.place})"
    if isinstance(answer.said, str):
        return f"{head} {answer.said}"
    if answer.failed:
        return f"{head} gave up: {answer.failed}"
    if not answer.said.work:
        return f"{head} is idle"
    lines = []
    for work in answer.said.work:
        what, seconds = work.phases[-1]
        calls = " > ".join(phase for phase, _ in work.phases)
        lines.append(f"{head} has been in {what} for {seconds:.0f} s ({calls})")
        lines += [f"    {line}" for line in work.stack]
    return "\n".join(lines)


def _waits_on(ranks: list[Answer]) -> dict[int | None, set[int]]:
    """By rank those that have begun fewer collectives in a group that both are members of."""
    counts: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for answer in ranks:
        assert answer.rank is not None and not isinstance(answer.said, str)
        for group in answer.said.groups:
            counts.setdefault((group.name, tuple(group.ranks)), {})[answer.rank] = group.count
    waits: dict[int | None, set[int]] = {answer.rank: set() for answer in ranks}
    for members in counts.values():
        for rank, count in members.items():
            waits[rank] |= {other for other, begun in members.items() if begun < count}
    return waits


def _in_collective(answer: Answer) -> bool:
    assert not isinstance(answer.said, str)
    innermost = [line for work in answer.said.work for line in work.stack[-3:]]
    return any(part in line for line in innermost for part in _OF_COLLECTIVES)
