"""Asks every process of a run what it is doing, by way of a task on each of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.diagnosis.process_status import Whereabouts, ask
from slime.diagnosis.stall import Answer
from slime.ray.remote import Place, Remote

T = TypeVar("T")
_ASK_TIMEOUT_S = 40.0  # a node may have to start a process for it


@dataclass(kw_only=True, frozen=True)
class Member(Generic[T]):
    """A process of the run under the name its user knows it by."""

    label: str
    remote: Remote[T]
    rank: int | None = None
    log: str = ""  # name of its file in the run's logs


def ask_members(members: Sequence[Member[Any]], failed: dict[str, str]) -> list[Answer]:
    """In their order; `failed` are errors that calls ended with, by label."""
    places = {member.label: member.remote.place() for member in members}
    said = _ask_places([place for place in places.values() if place is not None])
    answers = []
    for member in members:
        place = places[member.label]
        heard = "has not started" if place is None else said[place]
        where = str(place) if place is not None else "no process yet"
        answers.append(
            Answer(
                label=member.label,
                place=where,
                said=heard,
                rank=member.rank,
                failed=failed.get(member.label, ""),
            )
        )
    return answers


def _ask_places(places: list[Place]) -> dict[Place, Whereabouts | str]:
    said: dict[Place, Whereabouts | str] = dict.fromkeys(
        places, "cannot be reached: its node is gone"
    )
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    questions = {}
    for node in {place.node for place in places} & alive:
        there = [place for place in places if place.node == node]
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = _ask_all.options(num_cpus=0, scheduling_strategy=strategy)
        questions[task.remote([place.pid for place in there])] = there
    done, late = ray.wait(list(questions), num_returns=len(questions), timeout=_ASK_TIMEOUT_S)
    for reference in late:
        said.update(
            dict.fromkeys(questions[reference], "cannot be reached: its node does not answer")
        )
    for reference in done:
        try:
            said.update(zip(questions[reference], ray.get(reference), strict=True))
        except RayError:  # the node went meanwhile
            continue
    return said


@ray.remote(max_retries=0)
def _ask_all(pids: list[int]) -> list[Whereabouts | str]:
    return [ask(pid) for pid in pids]
