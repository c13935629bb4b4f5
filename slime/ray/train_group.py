"""The training side of a run: one Ray actor per rank, driven as one, timed and recorded."""

from __future__ import annotations

from typing import Any

import ray

from slime.ray.placement_group import Placement
from slime.ray.recorder import Recorder
from slime.ray.remote import Remote
from slime.ray.rollout_group import RolloutGroup
from slime.utils.arguments import Args
from slime.utils.errors import WeightMismatchError
from slime.utils.types import EngineInfo

BACKENDS = {"fsdp": "slime.backends.fsdp_utils.actor.FSDPTrainRayActor"}


class TrainGroup:
    """All ranks of the actor model; without ranks (`--debug-rollout-only`) every call does nothing."""

    def __init__(
        self, args: Args, placement: Placement, *, env: dict[str, str], recorder: Recorder
    ):
        self.args, self.recorder = args, recorder
        self.weight_version = 0  # of what the engines hold
        self.trained_version = 0  # what they held when the last training step ended
        self.last_trained: int | None = None  # rollout id
        self._asleep = False
        ranks = placement.layout.trainer
        self._actors = [
            Remote(
                {**placement.options(bundle, role="trainer"), "runtime_env": {"env_vars": env}},
                BACKENDS[args.train_backend],
                args,
                rank=rank,
                world_size=len(ranks),
            )
            for rank, bundle in enumerate(ranks)
        ]

    def start(self, checkpoint: str | None) -> list[Any]:
        """References that are ready when every rank has its model; engines can start meanwhile."""
        if not self._actors:
            return []
        self._all("set_master", *self._actors[0].get("get_master_address"))
        return [
            actor.call(
                "init",
                self.args,
                "actor",
                with_ref=needs_ref(self.args),
                checkpoint=checkpoint,
            )
            for actor in self._actors
        ]

    def parallel(self) -> tuple[int, int]:
        """Data-parallel and context-parallel size."""
        if not self._actors:
            return 1, 1
        info = self._actors[0].get("parallel_info")
        return info.dp_size, info.cp_size

    def train(self, rollout_id: int, batch_refs: list[Any]) -> None:
        if not self._actors:
            self.recorder.log_learning(rollout_id)
            return
        with self.recorder.phase("train"):
            self.wake_up()
            # Wrapped, so that Ray hands each rank the reference, not everybody's rows.
            reports = self._all("train", rollout_id, [[ref] for ref in batch_refs])
        self.last_trained, self.trained_version = rollout_id, self.weight_version
        self.recorder.add(reports[0].metrics)
        self.recorder.log_learning(rollout_id)

    def update_weights(self, rollout: RolloutGroup, rollout_id: int | None = None) -> None:
        """Give every engine the current weights and prove that they hold them.

        After a rollout that --update-weights-interval skips they keep what they have, unless they gave
        their memory away and so have nothing.
        """
        if not self._actors or not rollout.has_engines:
            return
        interval = self.args.update_weights_interval
        skipped = rollout_id is not None and (rollout_id + 1) % interval != 0
        if skipped and not self.args.offload_rollout:
            return
        with self.recorder.phase("update_weights"):
            self.weight_version += 1
            rollout.replace_failed()
            rollout.resume("weights")
            reports = self._push(rollout)
            if self.args.offload_train:
                self._all("sleep")
                self._asleep = True
            rollout.resume("kv_cache")
            rollout.admit_engines()
        self.recorder.add(reports[0].metrics())

    def wake_up(self) -> None:
        """Back on the device, which the engines must have left."""
        if self._asleep:
            self._all("wake_up")
            self._asleep = False

    def push_weights(self, engines: list[EngineInfo]) -> None:
        """The version all engines have, once more, for those that were started again."""
        self._all("update_weights", engines, self.weight_version)

    def _push(self, rollout: RolloutGroup) -> list[Any]:
        """To all engines; once more from the start if one of them died meanwhile.

        A broadcast that lost a member keeps the others waiting for it, so then all start again.
        """
        broadcast = self.args.update_weight_transport == "distributed"
        while True:
            try:
                return self._all("update_weights", rollout.engine_infos, self.weight_version)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error, WeightMismatchError):
                    raise
                if not rollout.replace_failed(all_if_any=broadcast):
                    raise

    def save(self, rollout_id: int, path: str) -> None:
        self._all("save", rollout_id, path)

    def wait_save(self) -> None:
        self._all("wait_save")

    def export_hf(self, path: str) -> None:
        self._all("export_hf", path)

    def stop(self) -> None:
        for actor in self._actors:
            actor.kill()
        self._actors = []

    def _all(self, method: str, *call_args: Any) -> list[Any]:
        return ray.get([actor.call(method, *call_args) for actor in self._actors])


def needs_ref(args: Args) -> bool:
    return args.use_kl_loss or args.kl_coef != 0
