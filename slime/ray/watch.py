"""Waits for the processes of a run, but not forever: a phase has a deadline, a dead process a name.

with watch.phase("train"):                 from here on the clock of --phase-timeout-minutes runs
    watch.get(references, members)         a result per member

      a member died          LostError: which one, where, why
      a member's call failed because another one died      the same, of that other one
      the deadline passed    StallError: every process's phase, call and stack, and who is late
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from slime.config.arguments import Args
from slime.config.flags.run import phase_timeouts
from slime.core.errors import UserError
from slime.diagnosis.run_monitor import died, raylet_answers
from slime.diagnosis.stall import describe
from slime.ray import local_ray
from slime.ray.cluster import raylet_socket
from slime.ray.stacks import Member, ask_members

_CONNECTION = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|DistBackendError|timed out|TCPStore|broken pipe",
    re.I,
)
_DEATH_KNOWN_S = 45.0  # Ray finds a dead process at once, a dead node after several silent checks
_OWNER_KNOWN_S = 10.0
_LOOK_EVERY_S = 30.0
T = TypeVar("T")
R = TypeVar("R")


class BrokenRunError(UserError):
    """The run cannot go on with the processes it has; the run adds what to type."""


class LostError(BrokenRunError):
    """A process died."""


class StallError(BrokenRunError):
    """A phase took longer than it may."""


class Watch:
    def __init__(self, args: Args, say: Callable[[str], None]):
        self._members: list[Callable[[], list[Member[Any]]]] = []
        self._limits = phase_timeouts(args.phase_timeout_minutes)
        self._say, self._logs = say, Path(args.run_dir) / "logs"
        self._phase: str | None = None
        self._began = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One inside another counts as a part of it."""
        if self._phase is not None or name not in self._limits:
            yield
            return
        self._phase, self._began = name, time.monotonic()
        try:
            yield
        finally:
            self._phase = None

    def add(self, members: Callable[[], list[Member[Any]]]) -> None:
        """Processes of the run; asked for anew each time, for engines come and go."""
        self._members.append(members)

    @property
    def members(self) -> list[Member[Any]]:
        return [member for members in self._members for member in members()]

    def left_s(self) -> float:
        """Seconds until the phase is overdue."""
        if self._phase is None:
            return float("inf")
        return max(0.0, self._began + self._limits[self._phase] - time.monotonic())

    def check(self) -> None:
        """Raise StallError when the phase is overdue, or log-probs within it."""
        if self.left_s() == 0:
            assert self._phase is not None
            self._stalled(f"{self._phase} has taken more than {self._limits[self._phase]:g} s", {})
        took = time.monotonic() - self._began
        if self._phase == "train" and took > self._limits["log_probs"] and self._in_log_probs():
            self._stalled(f"log-probs have taken more than {self._limits['log_probs']:g} s", {})

    def get(
        self, references: Sequence[ray.ObjectRef[T]], members: Sequence[Member[Any]]
    ) -> list[T]:
        """Results of one call of each member; any error ends the wait for all."""
        owners = dict(zip(references, members, strict=True))
        pending = list(references)
        while pending:
            done, pending = ray.wait(pending, timeout=min(_LOOK_EVERY_S, self.left_s()))
            for reference in done:
                self._settle(reference, pending, owners)
            if not done:
                self.check()
        return ray.get(list(references))

    def call(self, member: Member[T], method: Callable[[T], R]) -> R:
        """Call a method of one process and wait for its result."""
        return self.get([member.remote.call(method)], [member])[0]

    def lost(self, member: Member[Any], error: Exception) -> LostError:
        """Name the dead process. Without their raylet all actors of a node seem to have died."""
        process = local_ray.dead_process()
        if process is not None:
            return LostError(f"{died(process)}: Ray cannot go on without it.")
        if not raylet_answers(raylet_socket()):
            return LostError("Ray's raylet on the driver's node died: Ray cannot go on without it.")
        place = member.remote.place()
        where = f" ({place})" if place is not None else ""
        log = f" Its log: {self._logs / member.log}" if member.log else ""
        return LostError(f"{member.label}{where} died: {_reason(error)}{log}")

    def _settle(self, reference: Any, pending: list[Any], owners: dict[Any, Member[Any]]) -> None:
        try:
            ray.get(reference)
        except (RayActorError, OutOfMemoryError) as error:
            lost = self.lost(owners[reference], error)
            raise self._with_survivors(lost, pending, owners) from error
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError):
                self._name_the_dead(error)
            if pending and _CONNECTION.search(str(error.cause)):
                self._blame(owners[reference], error, pending, owners)
            raise

    def _name_the_dead(self, error: Exception) -> None:
        """What one process made for another is lost with it: the rows of a rollout, with its manager."""
        asked = {member.remote.ping(): member for member in self.members}
        pending, deadline = list(asked), time.monotonic() + _OWNER_KNOWN_S
        while pending and time.monotonic() < deadline:
            done, pending = ray.wait(pending, timeout=1.0)
            for reference in done:
                if death := _death(reference):
                    raise self.lost(asked[reference], death) from error

    def _blame(
        self, first: Member[Any], error: Any, pending: list[Any], owners: dict[Any, Member[Any]]
    ) -> None:
        """A lost connection is what others see of a death, a collective that timed out of a stall."""
        failed = {first.label: _first_line(error.cause)}
        deadline = time.monotonic() + min(_DEATH_KNOWN_S, self.left_s())
        while pending and time.monotonic() < deadline:
            done, pending = ray.wait(pending, timeout=1.0)
            for reference in done:
                try:
                    ray.get(reference)
                except RayActorError as death:
                    raise self.lost(owners[reference], death) from death
                except RayTaskError as other:
                    failed[owners[reference].label] = _first_line(other.cause)
        if pending:
            self._stalled("a collective operation got no further", failed)

    def _with_survivors(
        self, lost: LostError, pending: list[Any], owners: dict[Any, Member[Any]]
    ) -> LostError:
        """NCCL ends every process that waited too long, so of several deaths the one that lives on may
        be the cause: where it is belongs to the message."""
        done, pending = (
            ray.wait(pending, num_returns=len(pending), timeout=3) if pending else ([], [])
        )
        died = [owners[reference] for reference in done if _death(reference)]
        if not died or not pending or "node" in str(lost):
            return lost
        names = ", ".join(member.label for member in died)
        text = describe(ask_members([owners[reference] for reference in pending], {}))
        return LostError(f"{lost}\nSo did {names}. These live on:\n{text}")

    def _in_log_probs(self) -> bool:
        ranks = [member for member in self.members if member.rank is not None]
        for answer in ask_members(ranks, {}):
            for work in [] if isinstance(answer.said, str) else answer.said.work:
                for what, seconds in work.phases:
                    if what.endswith("log_probs") and seconds > self._limits["log_probs"]:
                        return True
        return False

    def _stalled(self, what: str, failed: dict[str, str]) -> None:
        self._say(f"{what}: asking every process where it is")
        text = describe(ask_members(self.members, failed))
        file = self._logs / "stall.txt"
        file.write_text(f"{what}\n{text}\n")
        raise StallError(f"{what}.\n{text}\nThe same is in {file}.")


def _death(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except RayActorError as error:
        return error
    except RayTaskError:
        return None
    return None


def _reason(error: Exception) -> str:
    """The line of Ray's long text that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if re.search(r"node|exit|kill|died because|signal", line, re.I)
    ]
    return (telling or lines or ["no reason is known"])[0]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
