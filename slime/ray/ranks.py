"""The processes of one model, one per rank, called as one."""

from __future__ import annotations

from typing import Any

import ray

from slime.config.arguments import Args
from slime.ray.placement_group import Placement
from slime.ray.remote import Remote
from slime.ray.stacks import Member
from slime.ray.watch import Watch


class Ranks:
    """All ranks of the actor or of the critic; there may be none."""

    def __init__(
        self,
        args: Args,
        path: str,
        placement: Placement,
        *,
        role: str,
        env: dict[str, str],
        watch: Watch,
    ):
        bundles = placement.layout.trainer
        self.role, self._watch = role, watch
        self.asleep = False
        self._actors = [
            Remote(
                {**placement.options(bundle, role=role), "runtime_env": {"env_vars": env}},
                path,
                args,
                rank=rank,
                world_size=len(bundles),
            )
            for rank, bundle in enumerate(bundles)
        ]
        name = "trainer" if role == "actor" else role
        self._members = [
            Member(label=f"{name} rank {rank}", remote=actor, rank=rank, log=f"{name}_{rank}.log")
            for rank, actor in enumerate(self._actors)
        ]
        watch.add(lambda: self._members)

    def __bool__(self) -> bool:
        return bool(self._actors)

    def start(self, args: Args, **options: Any) -> list[ray.ObjectRef]:
        """References that are ready when every rank has its model."""
        if not self._actors:
            return []
        self.ask("log_to_file", "trainer" if self.role == "actor" else self.role)
        self.all("set_master", *self.first("get_master_address"))
        return self.ask("init", args, self.role, **options)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """One reference per rank."""
        return [actor.call(method, *args, **kwargs) for actor in self._actors]

    def ask_each(
        self, method: str, *args: Any, last: list[ray.ObjectRef] | None
    ) -> list[ray.ObjectRef]:
        """The same, each rank with its own last argument, which goes straight from process to process."""
        if last is None:
            return self.ask(method, *args)
        return [
            actor.call(method, *args, own) for actor, own in zip(self._actors, last, strict=True)
        ]

    def all(self, method: str, *args: Any) -> list[Any]:
        return self.wait(self.ask(method, *args))

    def wait(self, references: list[ray.ObjectRef]) -> list[Any]:
        """What the ranks answer to an `ask`."""
        return self._watch.get(references, self._members)

    def first(self, method: str) -> Any:
        return self._watch.call(self._members[0], method)

    def sleep(self) -> None:
        if not self.asleep:
            self.all("sleep")
            self.asleep = True

    def wake_up(self) -> None:
        """Back on the device, which the others must have left."""
        if self.asleep:
            self.all("wake_up")
            self.asleep = False

    def stop(self) -> None:
        for actor in self._actors:
            actor.kill()
        self._actors = []
