"""Wait for the processes of a run, with a deadline per phase, and name the process that died.

with deadline.enter("train"):              --phase-timeout-minutes applies
    watch.get(references, members)         one result per member

  a member died                     LostError: which one, where, why
  a call failed because another
  member died                       LostError, naming that other member
  the deadline passed               StallError: phase, call and stack of every process, and which is late
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.diagnosis.process_status import ProcessStatus, query_status
from slime.diagnosis.run_monitor import died, raylet_answers
from slime.diagnosis.stall import MemberStatus, PhaseDeadline, describe
from slime.ray import local_ray
from slime.ray.cluster import raylet_socket
from slime.ray.remote import ACTOR_DIED, Place, Remote

_CONNECTION = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|DistBackendError|timed out|TCPStore|broken pipe",
    re.I,
)
# Ray notices a dead process immediately, a dead node after several missed heartbeats.
_DEATH_KNOWN_S = 45.0
_OWNER_KNOWN_S = 10.0
_POLL_S = 30.0
_STATUS_TIMEOUT_S = 40.0  # a node may have to start a process for the query
T = TypeVar("T")
R = TypeVar("R")


class BrokenRunError(UserError):
    """The run cannot continue with the processes it has; the run adds what to type."""


class LostError(BrokenRunError):
    """A process died."""


class StallError(BrokenRunError):
    """A phase took longer than its timeout."""


def ray_lost() -> LostError | None:
    """Return the error to raise if a process of the run's own Ray has died."""
    process = local_ray.dead_process()
    return LostError(f"{died(process)}: Ray cannot work without it.") if process else None


@dataclass(kw_only=True, frozen=True)
class Member(Generic[T]):
    """A process of the run and the name that messages use for it."""

    label: str
    remote: Remote[T]
    rank: int | None = None
    log: str = ""  # name of its file in the run's logs


class Watch:
    def __init__(self, args: Args, deadline: PhaseDeadline, notify: Callable[[str], None]):
        self._members: list[Callable[[], list[Member[Any]]]] = []
        self.deadline = deadline
        self._notify, self._logs = notify, Path(args.run_dir) / "logs"

    def add(self, members: Callable[[], list[Member[Any]]]) -> None:
        """Register a function that returns processes of the run: engines are replaced."""
        self._members.append(members)

    @property
    def members(self) -> list[Member[Any]]:
        return [member for members in self._members for member in members()]

    def check(self) -> None:
        """Raise StallError when the phase is overdue, or log-probs within it."""
        phase, limits = self.deadline.phase, self.deadline.limits
        if self.deadline.left_s() == 0:
            assert phase is not None
            self._stalled(f"{phase} has taken more than {limits[phase]:g} s", {})
        late = phase == "train" and self.deadline.elapsed_s() > limits["log_probs"]
        if late and self._in_log_probs(limits["log_probs"]):
            self._stalled(f"log-probs have taken more than {limits['log_probs']:g} s", {})

    def get(
        self, references: Sequence[ray.ObjectRef[T]], members: Sequence[Member[Any]]
    ) -> list[T]:
        """Return the results of one call of each member; any error ends the wait for all."""
        owners = dict(zip(references, members, strict=True))
        pending = list(references)
        while pending:
            done, pending = ray.wait(pending, timeout=min(_POLL_S, self.deadline.left_s()))
            for reference in done:
                self._raise_error_of(reference, pending, owners)
            if not done:
                self.check()
        return ray.get(list(references))

    def call(self, member: Member[T], method: Callable[[T], R]) -> R:
        """Call a method of one process and wait for its result."""
        return self.get([member.remote.call(method)], [member])[0]

    def lost(self, member: Member[Any], error: Exception) -> LostError:
        """Return an error that names the dead process. Without its raylet all actors of a node seem dead."""
        if (ray_death := ray_lost()) is not None:
            return ray_death
        if not raylet_answers(raylet_socket()):
            return LostError("Ray's raylet on the driver's node died: Ray cannot work without it.")
        place = member.remote.place()
        where = f" ({place})" if place is not None else ""
        log = f" Its log: {self._logs / member.log}" if member.log else ""
        return LostError(f"{member.label}{where} died: {cause_line(error)}{log}")

    def _raise_error_of(
        self, reference: Any, pending: list[Any], owners: dict[Any, Member[Any]]
    ) -> None:
        try:
            ray.get(reference)
        except ACTOR_DIED as error:
            lost = self.lost(owners[reference], error)
            raise self._with_survivors(lost, pending, owners) from error
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError):
                self._raise_dead_owner(error)
            if pending and _CONNECTION.search(str(error.cause)):
                self._find_cause(owners[reference], error, pending, owners)
            raise

    def _raise_dead_owner(self, error: Exception) -> None:
        """Raise LostError for a member that died: its objects, such as the rows of a rollout, are lost."""
        pinged = {member.remote.ping(): member for member in self.members}
        pending, deadline = list(pinged), time.monotonic() + _OWNER_KNOWN_S
        while pending and time.monotonic() < deadline:
            done, pending = ray.wait(pending, timeout=1.0)
            for reference in done:
                if death := _death(reference):
                    raise self.lost(pinged[reference], death) from error

    def _find_cause(
        self, first: Member[Any], error: Any, pending: list[Any], owners: dict[Any, Member[Any]]
    ) -> None:
        """Raise the cause of a lost connection: the death of another member, or a stalled collective."""
        failed = {first.label: first_line(error)}
        deadline = time.monotonic() + min(_DEATH_KNOWN_S, self.deadline.left_s())
        while pending and time.monotonic() < deadline:
            done, pending = ray.wait(pending, timeout=1.0)
            for reference in done:
                try:
                    ray.get(reference)
                except ACTOR_DIED as death:
                    raise self.lost(owners[reference], death) from death
                except RayTaskError as other:
                    failed[owners[reference].label] = first_line(other)
        if pending:
            self._stalled("a collective operation stalled", failed)

    def _with_survivors(
        self, lost: LostError, pending: list[Any], owners: dict[Any, Member[Any]]
    ) -> LostError:
        """Add the status of the surviving members if several died.

        NCCL kills every process that waited too long, so the cause may be a process that survives.
        """
        done, pending = (
            ray.wait(pending, num_returns=len(pending), timeout=3) if pending else ([], [])
        )
        dead = [owners[reference] for reference in done if _death(reference)]
        if not dead or not pending or "node" in str(lost):
            return lost
        names = ", ".join(member.label for member in dead)
        text = describe(query_members([owners[reference] for reference in pending], {}))
        return LostError(f"{lost}\nSo did {names}. Still alive:\n{text}")

    def _in_log_probs(self, limit_s: float) -> bool:
        """Return whether a trainer rank has been in a log-probs phase for more than `limit_s`."""
        ranks = [member for member in self.members if member.rank is not None]
        return any(
            phase.endswith("log_probs") and seconds > limit_s
            for member in query_members(ranks, {})
            if not isinstance(member.status, str)
            for thread in member.status.work
            for phase, seconds in thread.phases
        )

    def _stalled(self, what: str, failed: dict[str, str]) -> None:
        self._notify(f"{what}: collecting the status of every process")
        text = describe(query_members(self.members, failed))
        file = self._logs / "stall.txt"
        try:
            file.write_text(f"{what}\n{text}\n")
        except OSError as error:  # a full disk may be what stalled the run
            raise StallError(
                f"{what}.\n{text}\nIt could not be written to {file}: {error}"
            ) from None
        raise StallError(f"{what}.\n{text}\nThe same is in {file}.")


def query_members(members: Sequence[Member[Any]], failed: dict[str, str]) -> list[MemberStatus]:
    """Return the status of every member, in order; `failed` are errors of calls, by label."""
    places = [member.remote.place() for member in members]
    statuses = _query_places([place for place in places if place is not None])
    return [
        MemberStatus(
            label=member.label,
            place=str(place) if place is not None else "no process yet",
            status="has not started" if place is None else statuses[place],
            rank=member.rank,
            failed=failed.get(member.label, ""),
        )
        for member, place in zip(members, places, strict=True)
    ]


def _query_places(places: list[Place]) -> dict[Place, ProcessStatus | str]:
    """Query processes by a task on each of their nodes."""
    statuses: dict[Place, ProcessStatus | str] = dict.fromkeys(
        places, "cannot be reached: its node is gone"
    )
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    queries = {}
    for node in {place.node for place in places} & alive:
        there = [place for place in places if place.node == node]
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        task = _query_pids.options(num_cpus=0, scheduling_strategy=strategy)
        queries[task.remote([place.pid for place in there])] = there
    done, late = ray.wait(list(queries), num_returns=len(queries), timeout=_STATUS_TIMEOUT_S)
    for reference in late:
        statuses.update(
            dict.fromkeys(queries[reference], "cannot be reached: its node does not answer")
        )
    for reference in done:
        try:
            statuses.update(zip(queries[reference], ray.get(reference), strict=True))
        except RayError:  # the node was lost in the meantime
            continue
    return statuses


@ray.remote(max_retries=0)
def _query_pids(pids: list[int]) -> list[ProcessStatus | str]:
    return [query_status(pid) for pid in pids]


def _death(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except ACTOR_DIED as error:
        return error
    except RayTaskError:
        return None
    return None


def cause_line(error: BaseException) -> str:
    """Return the line of Ray's long text that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [
        line for line in lines if re.search(r"node|exit|kill|died because|signal", line, re.I)
    ]
    return (causes or lines or ["unknown reason"])[0]


def first_line(error: BaseException) -> str:
    """Return what happened in one line, without Ray's traceback around the error of an actor."""
    cause = getattr(error, "cause", error)
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0][:300]
