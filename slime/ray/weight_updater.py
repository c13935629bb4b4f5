"""The single owner of the version of the weights that engines hold.

    train ──▶ trained(): the trainer's weights have no version yet
    update()             push to all engines ──▶ verify ──▶ admit ──▶ tell the manager the version
    update_restarted()   the same for restarted engines while all others generate

Both push through `_retry`, the only place where an update is retried. If trainer and engines share GPUs and offload,
an engine starts only while the trainer sleeps, since it sizes its KV cache by the free memory; and to update
a restarted engine during a rollout, all engines stop and release their memory to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from ray.exceptions import RayTaskError

from slime.config.arguments import Args
from slime.core.errors import UserError, WeightMismatchError, WeightSyncError
from slime.core.types import EngineInfo, SyncReport
from slime.ray.engine_group import EngineCallError
from slime.runlog.recorder import Recorder
from slime.utils.sync_http import HttpError

if TYPE_CHECKING:
    from slime.ray.rollout_group import Engines
    from slime.ray.train_group import Ranks

_TRIES = 5  # of one update, each with the remaining and the restarted engines


class WeightUpdater:
    """Gives engines the trainer's weights, one version number per training step that is sent."""

    def __init__(
        self, args: Args, trainer: Ranks, engines: Engines, recorder: Recorder, *, version: int
    ):
        self.args, self._recorder = args, recorder
        self._trainer, self._engines = trainer, engines
        self.version = version  # the newest that any engine holds
        self.trained_version = version  # the one held when the last training step ended
        self.last_trained: int | None = None  # the rollout the trainer's weights were trained on
        self._numbered = False  # whether the trainer's weights have a version already

    def due(self, rollout_id: int) -> bool:
        """Return whether the engines get new weights after this rollout.

        They also do after the last one, so that the last evaluation scores the saved weights.
        """
        every, last = self.args.update_weights_interval, self.args.num_rollout - 1
        return (rollout_id + 1) % every == 0 or rollout_id == last

    def trained(self, rollout_id: int) -> None:
        """Note that the trainer's weights have changed."""
        self.last_trained, self.trained_version = rollout_id, self.version
        self._numbered = False

    def update(self, rollout_id: int | None = None) -> None:
        """Give every engine the current weights and verify that it holds them.

        After a rollout that --update-weights-interval skips, engines keep their weights, unless they
        released their memory.
        """
        if not self._trainer or not self._engines:
            return
        if rollout_id is not None and not self.due(rollout_id) and not self.args.offload_rollout:
            return
        with self._recorder.phase("update_weights"):
            self._assign_version()
            self._replace_failed()
            reports = self._retry(self._push_to_all)
            self._engines.admit()
            self._engines.set_version(self.version, rollout_id)
        self._recorder.add(reports[0].metrics())
        self._note_holders(self._engines.infos)

    def update_restarted(self) -> None:
        """Send engines that were restarted the weights the trainer holds now, under their own version.

        If the next rollout is generated while this one is trained on, these are newer than the weights
        of all other engines, which get the same version in the next update. Restarted
        engines of frozen models hold their weights already.
        """
        if self._engines.unsynced:
            self._assign_version()
            restarted = list(self._engines.unsynced)
            with self._trainer_awake():
                self._retry(self._push_to_restarted)
            self._note_holders(restarted)
            if self.last_trained is not None:
                self._engines.set_version(self.version, self.last_trained)
        self._engines.admit()

    def _note_holders(self, engines: list[EngineInfo]) -> None:
        urls = [engine.url for engine in engines]
        self._recorder.event("weights", version=self.version, engines=urls)

    def _assign_version(self) -> None:
        """Count up once per training step that is sent: engines of one version hold equal weights."""
        if not self._numbered:
            self.version += 1
            self._numbered = True

    def _push(self, engines: list[EngineInfo]) -> list[SyncReport]:
        return self._trainer.all(lambda rank: rank.update_weights(engines, self.version))

    def _push_to_all(self) -> list[SyncReport]:
        self._engines.resume("weights")
        reports = self._push(self._engines.infos)
        if self.args.offload_train:
            self._trainer.sleep()
        self._engines.resume("kv_cache")
        self._engines.check_probe(reports[0].probe)
        return reports

    def _push_to_restarted(self) -> list[SyncReport]:
        self._engines.resume("weights")
        return self._push(self._engines.unsynced)

    @contextmanager
    def _trainer_awake(self) -> Iterator[None]:
        """Wake a trainer that sleeps during a rollout; engines give their memory away until it sleeps again."""
        if not self._trainer.asleep:
            yield
            return
        if self.args.offload_rollout:
            self._engines.interrupt()
            self._engines.release()
        self._trainer.wake_up()
        yield
        self._trainer.sleep()
        self._engines.resume("kv_cache")

    def _replace_failed(self, *, paused: bool = False, known: Sequence[int] = ()) -> list[int]:
        """Replace failed engines while the trainer sleeps, if it ever does."""
        if not self.args.offload_train:
            return self._engines.replace_failed(paused=paused, known=known)
        replaced = self._engines.replace_failed(
            paused=paused, known=known, before=self._trainer.sleep
        )
        if self._trainer.asleep:  # an engine was started, or a push failed late
            self._engines.release()
            self._trainer.wake_up()
        return replaced

    def _retry(self, push: Callable[[], list[SyncReport]]) -> list[SyncReport]:
        """Push, and restart the push while it fails because an engine failed.

        The remaining engines stay paused, with weights of two versions. A push that did not reach an engine
        is retried once even if all engines answer again: an engine may have been frozen for a while.
        """
        for attempt in range(_TRIES):
            try:
                return push()
            except (RayTaskError, HttpError) as error:
                last = attempt == _TRIES - 1 or not self.args.use_fault_tolerance
                if isinstance(error, WeightMismatchError) or last:
                    _raise(error)
                known = error.engines if isinstance(error, EngineCallError) else ()
                replaced = self._replace_failed(paused=True, known=known)
                unreached = isinstance(error, (HttpError, WeightSyncError)) and attempt == 0
                if not replaced and not unreached:
                    _raise(error)
        raise AssertionError("unreachable")


def _raise(error: Exception) -> NoReturn:
    """Raise a failed call of the driver as a UserError; a rank's error keeps its traceback."""
    if isinstance(error, RayTaskError):
        raise error
    raise UserError(str(error)) from error
