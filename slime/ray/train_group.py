"""The driver's handle on the training side: the verbs of the loop, timed and recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from slime.config.arguments import Args
from slime.core.types import CriticColumns, TrainReport
from slime.ray.ranks import Ranks
from slime.ray.rollout_group import RolloutGroup
from slime.ray.weight_updater import WeightUpdater
from slime.runlog.export_folder import ExportInfo
from slime.runlog.recorder import Recorder

if TYPE_CHECKING:
    from slime.backends.base import TrainRayActor


class TrainGroup:
    """Actor and, for PPO, critic; without ranks (`--debug-rollout-only`) every call does nothing.

    The critic sits on the actor's devices. With --offload-train they take turns: only one of them, or
    an engine, is on the device at a time.
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
        # Wrapped, so that Ray hands each rank the reference, not everybody's rows.
        rows = [[ref] for ref in batch_refs]
        with self.recorder.phase("train"):
            train = self._train_pair if self._critic else self._train_actor
            reports = train(rollout_id, rows)
        self._updater.trained(rollout_id)
        for report in reports:
            self.recorder.add(report.metrics)
        self.recorder.log_learning(rollout_id)

    def _train_actor(self, rollout_id: int, rows: list[Any]) -> list[TrainReport]:
        self.wake_up()
        return self._actor.all(lambda rank: rank.train(rollout_id, rows))[:1]

    def _train_pair(self, rollout_id: int, rows: list[Any]) -> list[TrainReport]:
        """Values by the critic, steps of the actor, steps of the critic."""
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
        reports = self._actor.wait(trained)[:1]
        if in_turns:
            ray.wait(targets, num_returns=len(targets))
            self._actor.sleep()
            critic.wake_up()
        reports += critic.wait(critic.ask_each(train, targets))[:1]
        if in_turns:
            critic.sleep()
            self.wake_up()
        return reports

    def update_weights(self, rollout: RolloutGroup, rollout_id: int | None = None) -> None:
        """Give every engine of `rollout` the current weights and verify that it holds them."""
        rollout.updater.update(rollout_id)

    def wake_up(self) -> None:
        """Return to the device, which the engines must have left."""
        self._actor.wake_up()

    def save(self, rollout_id: int, path: str, critic_path: str | None = None) -> None:
        self._actor.all(lambda rank: rank.save(rollout_id, path))
        if self._critic and critic_path is not None:
            asleep = self._critic.asleep
            if asleep:
                self._actor.sleep()
                self._critic.wake_up()
            self._critic.all(lambda rank: rank.save(rollout_id, critic_path))
            if asleep:
                self._critic.sleep()
                self.wake_up()

    def wait_save(self) -> None:
        self._actor.all(lambda rank: rank.wait_save())
        if self._critic:
            self._critic.all(lambda rank: rank.wait_save())

    def export_hf(self, path: str, info: ExportInfo) -> None:
        self._actor.all(lambda rank: rank.export_hf(path, info))
