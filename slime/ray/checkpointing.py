"""Saves and resumes a whole run: trainer, data position and buffer, weight version."""

from __future__ import annotations

from pathlib import Path

from slime.ray.rollout_group import RolloutGroup
from slime.ray.train_group import TrainGroup
from slime.utils.arguments import Args
from slime.utils.checkpoint import CheckpointFolder, CheckpointMeta, find_checkpoint, read_meta
from slime.utils.errors import ConfigError, UserError


class Checkpointer:
    """Knows where a run starts, and makes each of its checkpoints complete or absent."""

    def __init__(self, args: Args):
        self.args = args
        self.loaded: Path | None = find_checkpoint(args.load, args.ckpt_step)
        meta = read_meta(self.loaded) if self.loaded else None
        if meta and meta.train_backend != args.train_backend:
            raise ConfigError(
                f"--load {self.loaded} was written by the {meta.train_backend} backend; "
                f"use --train-backend {meta.train_backend}"
            )
        self.weight_version = meta.weight_version if meta else 0
        self.start_rollout_id = meta.rollout_id + 1 if meta else 0
        if args.start_rollout_id is not None:
            self.start_rollout_id = args.start_rollout_id
        self._folder = CheckpointFolder(args.save) if args.save else None
        self._pending: CheckpointMeta | None = None  # being written in the background
        self._saved = meta.rollout_id if meta and args.load == args.save else None

    def save(self, rollout_id: int, actor: TrainGroup, rollout: RolloutGroup) -> None:
        """Write the state after training on `rollout_id`; with --async-save `finish` makes it count."""
        if self._folder is None or rollout_id == self._saved:
            return
        self.finish(actor)
        meta = CheckpointMeta(
            rollout_id=rollout_id,
            weight_version=actor.trained_version,
            train_backend=self.args.train_backend,
        )
        try:
            path = str(self._folder.begin(rollout_id))
            actor.save(rollout_id, path)
            rollout.save(path, rollout_id)
        except Exception as error:
            raise self._failed(rollout_id, error) from error
        self._pending = meta
        if not self.args.async_save:
            self.finish(actor)

    def finish(self, actor: TrainGroup) -> None:
        """Wait for a save in the background and make it count."""
        if self._pending is None or self._folder is None:
            return
        meta, self._pending = self._pending, None
        try:
            actor.wait_save()
            self._folder.commit(meta, keep=self.args.save_total_limit)
        except Exception as error:
            raise self._failed(meta.rollout_id, error) from error
        self._saved = meta.rollout_id

    def _failed(self, rollout_id: int, error: Exception) -> UserError:
        assert self._folder is not None
        self._folder.discard(rollout_id)
        good = self._folder.rollout_ids()
        last = (
            f"the last good checkpoint is {self._folder.path(good[-1])}"
            if good
            else "there is no earlier checkpoint"
        )
        cause = str(error.__cause__ or error).strip().splitlines()[-1]
        return UserError(
            f"could not save rollout {rollout_id} to {self._folder.root}: {cause}; {last}. "
            f"Mend the cause and continue with --load {self._folder.root}"
        )
