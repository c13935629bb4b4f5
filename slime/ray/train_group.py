"""The driver's handle on the training side: the verbs of the loop, and the ranks of a model called as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from slime.config.arguments import Args
from slime.core.types import CriticColumns, TrainReport
from slime.ray.placement_group import Placement
from slime.ray.remote import Remote, trainer, value_of
from slime.ray.rollout_group import RolloutGroup
from slime.ray.watch import Member, Watch
from slime.ray.weight_updater import WeightUpdater
from slime.runlog.export_folder import ExportInfo
from slime.runlog.recorder import Recorder

if TYPE_CHECKING:
    from slime.backends.base import TrainRayActor

A = TypeVar("A")
R = TypeVar("R")


class TrainGroup:
    """Actor and, for PPO, critic; without ranks (`--debug-rollout-only`) every call does nothing.

    The critic runs on the actor's devices. With --offload-train only one of actor, critic and engines
    is on the device at a time.
    """

    def __init__(
        self,
        args: Args,
        *,
        actor: Ranks,
        critic: Ranks | None,
        updater: WeightUpdater,
        recorder: Recorder,
    ):
        self.args, self.recorder = args, recorder
        self._actor, self._critic, self._updater = actor, critic, updater

    @property
    def last_trained(self) -> int | None:
        """The rollout that the weights were trained on last; None before the first step."""
        return self._updater.last_trained

    @property
    def trained_version(self) -> int:
        """The version of the weights that engines held when the last training step ended."""
        return self._updater.trained_version

    def train(self, rollout_id: int, batch_refs: list[Any]) -> None:
        if not self._actor:
            self.recorder.log_learning(rollout_id)
            return
        # Wrapped, so that Ray passes each rank the references, not the rows of all ranks.
        rows = [[ref] for ref in batch_refs]
        with self.recorder.phase("train"):
            train = self._train_pair if self._critic else self._train_actor
            reports = train(rollout_id, rows)
        self._updater.trained(rollout_id)
        self.recorder.add_trained(rollout_id, reports)
        self.recorder.log_learning(rollout_id)
        if self.args.ci_test:
            from slime.diagnosis.number_checks import check_numbers

            check_numbers(self.args, rollout_id, reports["trainer"][0].metrics)

    def _train_actor(self, rollout_id: int, rows: list[Any]) -> dict[str, list[TrainReport]]:
        self.wake_up()
        return {"trainer": self._actor.all(lambda rank: rank.train(rollout_id, rows))}

    def _train_pair(self, rollout_id: int, rows: list[Any]) -> dict[str, list[TrainReport]]:
        """Compute the critic's values, then train the actor, then the critic."""
        critic = self._critic
        assert critic is not None
        in_turns = self.args.offload_train

        def train(rank: TrainRayActor, columns: CriticColumns) -> TrainReport:
            return rank.train(rollout_id, rows, columns)

        critic.wake_up()
        values = critic.ask(lambda rank: rank.values(rows))
        if in_turns:
            ray.wait(values, num_returns=len(values))
            critic.sleep()
        self.wake_up()
        trained = self._actor.ask_each(train, values)
        targets = self._actor.ask(lambda rank: rank.critic_targets())
        reports = {"trainer": self._actor.wait(trained)}
        if in_turns:
            ray.wait(targets, num_returns=len(targets))
            self._actor.sleep()
            critic.wake_up()
        reports["critic"] = critic.wait(critic.ask_each(train, targets))
        if in_turns:
            critic.sleep()
            self.wake_up()
        return reports

    def update_weights(self, rollout: RolloutGroup, rollout_id: int | None = None) -> None:
        """Give every engine of `rollout` the current weights and verify that it holds them."""
        rollout.updater.update(rollout_id)

    def wake_up(self) -> None:
        """Reload the actor onto the device, which the engines must have left."""
        self._actor.wake_up()

    def save(self, rollout_id: int, path: str, critic_path: str | None = None) -> None:
        self._actor.all(lambda rank: rank.save_to(path, rollout_id))
        if self._critic and critic_path is not None:
            asleep = self._critic.asleep
            if asleep:
                self._actor.sleep()
                self._critic.wake_up()
            self._critic.all(lambda rank: rank.save_to(critic_path, rollout_id))
            if asleep:
                self._critic.sleep()
                self.wake_up()

    def wait_save(self) -> None:
        self._actor.all(lambda rank: rank.wait_save())
        if self._critic:
            self._critic.all(lambda rank: rank.wait_save())

    def export_hf(self, path: str, info: ExportInfo) -> None:
        self._actor.all(lambda rank: rank.export_hf(path, info))


class Ranks:
    """The processes of the actor or of the critic, one per rank, called as one; there may be none."""

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
        """Make every rank build and load its model, and offload it if `asleep`; `wait_started` waits for it."""
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
        """Call a method on every rank with its own value, which goes directly from process to process."""
        return [
            actor.call(lambda rank, own=own: method(rank, value_of(own)))
            for actor, own in zip(self._actors, values, strict=True)
        ]

    def all(self, method: Callable[[TrainRayActor], R]) -> list[R]:
        return self.wait(self.ask(method))

    def wait(self, references: list[ray.ObjectRef[R]]) -> list[R]:
        """Return the results of an `ask`."""
        return self._watch.get(references, self._members)

    def first(self, method: Callable[[TrainRayActor], R]) -> R:
        """Call a method on rank 0 alone."""
        return self._watch.call(self._members[0], method)

    def sleep(self) -> None:
        if not self.asleep:
            self.all(lambda rank: rank.sleep())
            self.asleep = True

    def wake_up(self) -> None:
        """Reload the model onto the device, which all other processes must have left."""
        if self.asleep:
            self.all(lambda rank: rank.wake_up())
            self.asleep = False

    def stop(self) -> None:
        for actor in self._actors:
            actor.kill()
        self._actors = []
