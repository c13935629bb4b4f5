"""The training side of a run: one Ray actor per rank, driven as one, timed and recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.core.reports import SyncReport, TrainReport
from slime.core.types import CriticColumns, EngineInfo
from slime.ray.placement_group import Placement
from slime.ray.ranks import Ranks
from slime.ray.recorder import Recorder
from slime.ray.rollout_group import RolloutGroup
from slime.runlog.export_folder import ExportInfo
from slime.utils.sync_http import HttpError

if TYPE_CHECKING:
    from slime.backends.base import TrainRayActor


class TrainGroup:
    """Actor and, for PPO, critic; without ranks (`--debug-rollout-only`) every call does nothing.

    The critic sits on the actor's devices. With --offload-train they take turns: only one of them, or
    an engine, is on the device at a time.
    """

    def __init__(
        self, args: Args, placement: Placement, *, env: dict[str, str], recorder: Recorder
    ):
        self.args, self.recorder = args, recorder
        self.weight_version = 0  # the newest that any engine holds
        self.trained_version = 0  # what they held when the last training step ended
        self.last_trained: int | None = None  # rollout id
        self._has_version = False  # whether the weights held now were given a version already
        watch = recorder.watch
        self._actor = Ranks(args, placement, role="actor", env=env, watch=watch)
        self._critic: Ranks | None = None
        if placement.layout.with_critic:
            self._critic = Ranks(args, placement, role="critic", env=env, watch=watch)
        self._starting: list[tuple[Ranks, list[Any]]] = []

    def start(self, checkpoint: str | None, critic_checkpoint: str | None = None) -> None:
        """Have every rank build and load its model until `wait`; engines can start meanwhile."""
        started = self._actor.start(
            self.args,
            with_ref=needs_ref(self.args),
            with_opd_teacher=self.args.use_opd and self.args.opd_type == "megatron",
            checkpoint=checkpoint,
        )
        self._starting = [(self._actor, started)] if started else []
        if self._critic:
            started = self._critic.start(self.args, checkpoint=critic_checkpoint)
            self._starting.append((self._critic, started))
            if self.args.offload_train:
                self._starting.append((self._critic, self._critic.ask(lambda rank: rank.sleep())))
                self._critic.asleep = True

    def wait(self) -> None:
        """Until every rank has its model."""
        for ranks, references in self._starting:
            ranks.wait(references)
        self._starting = []

    def parallel(self) -> tuple[int, int]:
        """Data-parallel and context-parallel size."""
        if not self._actor:
            return 1, 1
        info = self._actor.first(lambda rank: rank.parallel_info())
        return info.dp_size, info.cp_size

    def train(self, rollout_id: int, batch_refs: list[Any]) -> None:
        if not self._actor:
            self.recorder.log_learning(rollout_id)
            return
        # Wrapped, so that Ray hands each rank the reference, not everybody's rows.
        rows = [[ref] for ref in batch_refs]
        with self.recorder.phase("train"):
            train = self._train_pair if self._critic else self._train_actor
            reports = train(rollout_id, rows)
        self.last_trained, self.trained_version = rollout_id, self.weight_version
        self._has_version = False
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
        """Give every engine the current weights and prove that they hold them.

        After a rollout that --update-weights-interval skips they keep what they have, unless they gave
        their memory away and so have nothing.
        """
        if not self._actor or not rollout.has_engines:
            return
        interval = self.args.update_weights_interval
        skipped = rollout_id is not None and (rollout_id + 1) % interval != 0
        if skipped and not self.args.offload_rollout:
            return
        with self.recorder.phase("update_weights"):
            self._assign_version()
            rollout.replace_failed()
            reports = self._push(rollout)
            rollout.admit_engines()
            rollout.set_weight_version(self.weight_version, rollout_id)
        self.recorder.add(reports[0].metrics())

    def wake_up(self) -> None:
        """Back on the device, which the engines must have left."""
        self._actor.wake_up()

    def push_weights(self, engines: list[EngineInfo]) -> tuple[int, int | None]:
        """Send engines that were started again the weights held now, under their own version.

        Where the next rollout is generated while this one is trained on, these are newer than what
        the other engines hold: the update that comes next gives those the same version.
        Returns the version and the rollout it was trained on last.
        """
        self._assign_version()
        self._actor.all(lambda rank: rank.update_weights(engines, self.weight_version))
        return self.weight_version, self.last_trained

    def _assign_version(self) -> None:
        """One number per training step that is sent: engines of one version hold equal weights."""
        if not self._has_version:
            self.weight_version += 1
            self._has_version = True

    def _push(self, rollout: RolloutGroup) -> list[SyncReport]:
        """To all engines; once more from the start if one of them died or froze meanwhile.

        The others are left paused, with weights of two versions, until it succeeds.
        """
        try:
            return rollout.retry_update(lambda: self._push_once(rollout), self._actor.wake_up)
        except RayTaskError:
            raise
        except HttpError as error:
            raise UserError(str(error)) from error

    def _push_once(self, rollout: RolloutGroup) -> list[SyncReport]:
        rollout.resume("weights")
        engines, version = rollout.engine_infos, self.weight_version
        reports = self._actor.all(lambda rank: rank.update_weights(engines, version))
        if self.args.offload_train:
            self._actor.sleep()
        rollout.resume("kv_cache")
        rollout.check_probe(reports[0].probe)
        return reports

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

    def stop(self) -> None:
        self._actor.stop()
        if self._critic:
            self._critic.stop()


def needs_ref(args: Args) -> bool:
    return args.use_kl_loss or args.kl_coef != 0
