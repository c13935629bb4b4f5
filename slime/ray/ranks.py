"""The processes of one model, one per rank, called as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from slime.config.arguments import Args
from slime.ray.actors import trainer
from slime.ray.placement_group import Placement
from slime.ray.remote import Remote, value_of
from slime.ray.watch import Member, Watch

if TYPE_CHECKING:
    from slime.backends.base import TrainRayActor

A = TypeVar("A")
R = TypeVar("R")


class Ranks:
    """All ranks of the actor or of the critic; there may be none."""

    def __init__(
        self,
        args: Args,
        placement: Placement,
        *,
        role: str,
        env: dict[str, str],
        watch: Watch,
    ):
        bundles = placement.layout.trainer
        self._args, self.role, self._watch = args, role, watch
        self.asleep = False
        self._starting: list[list[Any]] = []  # references per call
        self._actors = [
            Remote(
                {**placement.options(bundle, role=role), "runtime_env": {"env_vars": env}},
                trainer(args.train_backend),
                args,
                rank=rank,
                world_size=len(bundles),
            )
            for rank, bundle in enumerate(bundles)
        ]
        self._log_name = "trainer" if role == "actor" else role
        self._members = [
            Member(
                label=f"{self._log_name} rank {rank}",
                remote=actor,
                rank=rank,
                log=f"{self._log_name}_{rank}.log",
            )
            for rank, actor in enumerate(self._actors)
        ]
        watch.add(lambda: self._members)

    def __bool__(self) -> bool:
        return bool(self._actors)

    def start(
        self,
        *,
        checkpoint: Path | None,
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        asleep: bool = False,
    ) -> None:
        """Have every rank build and load its model, and leave the device if `asleep`, until `wait_started`."""
        if not self._actors:
            return
        self.ask(lambda rank: rank.log_to_file(self._log_name))
        address, port = self.first(lambda rank: rank.get_master_address())
        self.all(lambda rank: rank.set_master(address, port))
        folder = str(checkpoint) if checkpoint else None
        init = self.ask(
            lambda rank: rank.init(
                self._args,
                self.role,
                with_ref=with_ref,
                with_opd_teacher=with_opd_teacher,
                checkpoint=folder,
            )
        )
        self.asleep = asleep
        self._starting = [init, *([self.ask(lambda rank: rank.sleep())] if asleep else [])]

    def wait_started(self) -> None:
        """Return once every rank has its model."""
        for references in self._starting:
            self.wait(references)
        self._starting = []

    def ask(self, method: Callable[[TrainRayActor], R]) -> list[ray.ObjectRef[R]]:
        """Call a method on every rank; one reference per rank."""
        return [actor.call(method) for actor in self._actors]

    def ask_each(
        self, method: Callable[[TrainRayActor, A], R], values: list[ray.ObjectRef[A]]
    ) -> list[ray.ObjectRef[R]]:
        """The same, each rank with a value of its own, which goes straight from process to process."""
        return [
            actor.call(lambda rank, own=own: method(rank, value_of(own)))
            for actor, own in zip(self._actors, values, strict=True)
        ]

    def all(self, method: Callable[[TrainRayActor], R]) -> list[R]:
        return self.wait(self.ask(method))

    def wait(self, references: list[ray.ObjectRef[R]]) -> list[R]:
        """Return what the ranks answer to an `ask`."""
        return self._watch.get(references, self._members)

    def first(self, method: Callable[[TrainRayActor], R]) -> R:
        """Call a method on rank 0 alone."""
        return self._watch.call(self._members[0], method)

    def sleep(self) -> None:
        if not self.asleep:
            self.all(lambda rank: rank.sleep())
            self.asleep = True

    def wake_up(self) -> None:
        """Return to the device, which the other processes must have left."""
        if self.asleep:
            self.all(lambda rank: rank.wake_up())
            self.asleep = False

    def stop(self) -> None:
        for actor in self._actors:
            actor.kill()
        self._actors = []
