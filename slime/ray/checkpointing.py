"""Save and resume a whole run: trainer, data position and buffer, weight version.

The critic of PPO is the folder `critic` inside each checkpoint, or with --critic-save a separate
checkpoint there, which is committed before the run's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from slime.config.arguments import Args
from slime.config.lora import check_lora_resume
from slime.core.errors import ConfigError, UserError
from slime.ray.rollout_group import RolloutGroup
from slime.ray.train_group import TrainGroup
from slime.ray.watch import BrokenRunError
from slime.runlog.checkpoint_folder import (
    CRITIC,
    CheckpointFolder,
    CheckpointMeta,
    check_quickly,
    find_checkpoint,
    how_to_continue,
    is_foreign,
    read_meta,
)
from slime.runlog.export_folder import ExportInfo, export_info, mark_outdated, recover_export

_LOW_SPACE = 1 << 30


class Checkpointer:
    """Determines where a run starts and writes its checkpoints atomically."""

    def __init__(self, args: Args):
        self.args = args
        self.loaded: Path | None = find_checkpoint(args.load, args.ckpt_step)
        meta = read_meta(self.loaded) if self.loaded else None
        if self.loaded and meta:
            check_quickly(self.loaded, meta)
        self.warnings: list[str] = []
        if args.load and not self.loaded:  # normal in run scripts that --load from their --save
            self.warnings.append(
                f"--load {args.load} holds no checkpoint: the run starts from scratch"
            )
        if meta and meta.train_backend != args.train_backend:
            raise ConfigError(
                f"--load {self.loaded} was written by the {meta.train_backend} backend; "
                f"use --train-backend {meta.train_backend}"
            )
        if self.loaded and meta and is_foreign(self.loaded) and not meta.release:
            from slime.backends.checkpoint_reader import refuse_foreign_optimizer  # imports torch

            refuse_foreign_optimizer(self.loaded)
        # Later checkpoints in the folder of --save are of a branch that this run does not continue.
        self._after = meta.rollout_id if meta else -1
        if meta and meta.release:  # nothing to resume: the trainer loads the weights itself
            self.loaded = meta = None
        if self.loaded:
            check_lora_resume(args, self.loaded)
        self.weight_version = meta.weight_version if meta else 0
        self.start_rollout_id = meta.rollout_id + 1 if meta else 0
        if args.start_rollout_id is not None:
            self.start_rollout_id = args.start_rollout_id
            self._after = min(self._after, args.start_rollout_id - 1)
        if self.start_rollout_id >= args.num_rollout > 0:
            self.warnings.append(
                f"nothing is left to train: the run would start with rollout {self.start_rollout_id} and "
                f"--num-rollout is {args.num_rollout}; raise it to continue"
            )
        # What the trainer holds before the first step, if it is the state after a rollout of this run.
        continued = meta is not None and meta.rollout_id + 1 == self.start_rollout_id
        self.loaded_rollout_id = meta.rollout_id if meta and continued else None
        self.critic_loaded = self._find_critic(meta.rollout_id) if meta else None
        # Without a trainer a checkpoint would be incomplete.
        save = None if args.debug_rollout_only else args.save
        self._folder = CheckpointFolder(save) if save else None
        self._critic_folder = CheckpointFolder(args.critic_save) if args.critic_save else None
        self._pending: CheckpointMeta | None = None  # being written in the background
        self._saved = self.loaded_rollout_id if args.load == args.save else None

    def save(self, rollout_id: int, actor: TrainGroup, rollout: RolloutGroup) -> None:
        """Write the state after training on `rollout_id`; with --async-save, `finish` commits it."""
        if self._folder is None or rollout_id == self._saved:
            return
        self.finish(actor)
        meta = CheckpointMeta(
            rollout_id=rollout_id,
            weight_version=actor.trained_version,
            train_backend=self.args.train_backend,
        )
        try:
            path = self._folder.begin(rollout_id)
            critic = [self._begin_critic(rollout_id, path)] if self.args.needs_critic else []
            actor.save(rollout_id, str(path), *critic)
            rollout.save(str(path), rollout_id)
        except Exception as error:
            raise self._failed(rollout_id, error) from error
        self._pending = meta
        if not self.args.async_save:
            self.finish(actor)

    def finish(self, actor: TrainGroup) -> None:
        """Wait for a save in the background and commit it."""
        if self._pending is None or self._folder is None:
            return
        meta, self._pending = self._pending, None
        try:
            actor.wait_save()
            if self._critic_folder:
                self._critic_folder.commit(meta, after=self._after)
            self._folder.commit(meta, keep=self.args.save_total_limit, after=self._after)
            if self._critic_folder:
                self._critic_folder.prune(self.args.save_total_limit)
        except Exception as error:
            raise self._failed(meta.rollout_id, error) from error
        self._saved = self._after = meta.rollout_id

    def how_to_continue(self) -> str:
        """Return what to type to resume the run."""
        args = self.args
        return how_to_continue(args.save, args.load, args.ckpt_step, args.start_rollout_id)

    def _begin_critic(self, rollout_id: int, path: Path) -> str:
        if self._critic_folder:
            return str(self._critic_folder.begin(rollout_id))
        (path / CRITIC).mkdir()
        return str(path / CRITIC)

    def _find_critic(self, rollout_id: int) -> Path | None:
        """Return the critic of the checkpoint that is resumed."""
        if not self.args.needs_critic or self.loaded is None:
            return None
        folders = [f for f in (self.args.critic_load, self.args.critic_save) if f]
        places = [self.loaded / CRITIC, *(CheckpointFolder(f).path(rollout_id) for f in folders)]
        found = next((place for place in places if place.is_dir()), None)
        if found is None:
            raise ConfigError(
                f"--load {self.loaded} has no critic, and --critic-load and --critic-save have none "
                "for that rollout: give --critic-load, or start from its weights with --ref-load instead of --load"
            )
        return found

    def _failed(self, rollout_id: int, error: Exception) -> UserError:
        assert self._folder is not None
        free = _free_space(self._folder.root)
        self._folder.discard(rollout_id)
        if self._critic_folder:
            self._critic_folder.discard(rollout_id)
        if isinstance(error, BrokenRunError):  # its message is more specific
            return error
        good = self._folder.rollout_ids()
        last = (
            f"the last good checkpoint is {self._folder.path(good[-1])}"
            if good
            else "there is no earlier checkpoint"
        )
        cause = _last_line(error)
        return UserError(
            f"could not save rollout {rollout_id} to {self._folder.root}: {cause}{free}; {last}. "
            f"Fix the problem and resume with --load {self._folder.root}"
        )


def _last_line(error: Exception) -> str:
    """Return the end of an actor's traceback, which names the error."""
    return str(error.__cause__ or error).strip().splitlines()[-1]


def _free_space(folder: Path) -> str:
    """Return the free space if it is little: errors of libraries on a full disk rarely say so."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f" ({free / 2**20:.0f} MiB are free there)" if free < _LOW_SPACE else ""


class HfExports:
    """Keeps the folders of `--save-hf` consistent with the checkpoints of a run."""

    def __init__(self, args: Args, checkpoints: Checkpointer):
        self._args, self._checkpoints = args, checkpoints

    @property
    def each(self) -> bool:
        """Return whether every checkpoint gets its own export, not only the last one."""
        return "{rollout_id" in (self._args.save_hf or "")

    def path(self, rollout_id: int) -> Path:
        assert self._args.save_hf is not None
        return Path(self._args.save_hf.format(rollout_id=rollout_id))

    def missing(self) -> int | None:
        """Return the rollout of the loaded checkpoint if its export is due and missing or stale."""
        saved = self._checkpoints.loaded_rollout_id
        if not self._args.save_hf or self._args.debug_rollout_only or saved is None:
            return None
        recover_export(self.path(saved))
        info = export_info(self.path(saved))
        due = self.each or saved + 1 >= self._args.num_rollout
        return saved if due and (info is None or info.rollout_id != saved) else None

    def mark_outdated(self, rollout_id: int) -> None:
        """Mark an export of an earlier training on the same rollout as stale."""
        if self._args.save_hf:
            mark_outdated(self.path(rollout_id), rollout_id)

    def write(self, rollout_id: int, actor: TrainGroup) -> None:
        path = self.path(rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        run_dir = str(Path(self._args.run_dir).resolve())
        try:
            actor.export_hf(str(path), ExportInfo(rollout_id=rollout_id, run_dir=run_dir))
        except (BrokenRunError, UserError):
            raise
        except Exception as error:
            cause = _last_line(error)
            raise UserError(
                f"could not write --save-hf {path}: {cause}.\n{self._checkpoints.how_to_continue()}"
            ) from error
