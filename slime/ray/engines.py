"""The engines of a run as its driver drives them: replaced when they fail, and named to the rollout manager.

Only engines that hold the current weights are named to the manager, which sends requests to no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.core.types import EngineInfo, Probe
from slime.ray.engine_group import EngineCallError, EngineGroup
from slime.ray.watch import Member, StallError, Watch
from slime.runlog.recorder import Recorder
from slime.serving.external import ExternalGroup
from slime.serving.health import check_probe

if TYPE_CHECKING:
    from slime.ray.rollout import RolloutManager

_RELEASE_TRIES = 5


class Engines:
    """Restarts engines and keeps the rollout manager's list of them; `group` has been started."""

    def __init__(
        self,
        args: Args,
        group: EngineGroup | ExternalGroup,
        manager: Member[RolloutManager],
        recorder: Recorder,
        watch: Watch,
    ):
        self.args, self._group, self._manager = args, group, manager
        self._recorder, self._watch = recorder, watch
        self._watch.add(group.members)

    def __bool__(self) -> bool:
        return self._group.count > 0

    @property
    def infos(self) -> list[EngineInfo]:
        """Engines that are up."""
        return self._group.infos

    @property
    def unsynced(self) -> list[EngineInfo]:
        """Engines that were restarted and hold no weights of this run yet."""
        return self._group.unsynced

    def wait(self) -> None:
        """Return once every engine answers."""
        try:
            self._group.wait(self._on_start_message)
        except StallError as error:
            error.args = (f"{error}\n{self._group.last_log_lines()}",)
            raise
        self.admit()

    def admit(self) -> None:
        """Let all engines generate: every one of them holds the current weights."""
        self._group.admit()
        self._generate_with(self._group.infos)

    def set_version(self, version: int, rollout_id: int | None) -> None:
        """Tell the manager that engines hold the weights after `rollout_id` (None: the first ones)."""
        following = None if rollout_id is None else rollout_id + 1
        self._watch.call(
            self._manager, lambda manager: manager.set_weight_version(version, following)
        )

    def replace_failed(self, *, paused: bool = False, known: Sequence[int] = ()) -> list[int]:
        """Restart engines that died or hang, and the `known` ones, on which a call failed.

        They get no request before they have the current weights. `paused`: generation is, as an update
        that failed leaves it.
        """
        if not self.args.use_fault_tolerance:
            return []
        failed = sorted({*self._group.failed(paused=paused), *known})
        if failed:
            self._generate_with(
                [
                    info
                    for i, info in enumerate(self._group.all)
                    if i not in failed and info not in self._group.unsynced
                ]
            )
        for index in failed:
            self._recorder.message(self._group.restart(index, self._recorder.message))
        return failed

    def restart_lost_router(self) -> None:
        if self._group.router_lost():
            self._recorder.message("the router ended and is started again")
            self._generate_with(self._group.infos)

    def release(self) -> None:
        """Free the engines' memory for the trainer; the next update serves those replaced here."""
        for attempt in range(_RELEASE_TRIES):
            try:
                return self._group.release()
            except EngineCallError as error:
                last = attempt == _RELEASE_TRIES - 1
                if last or not self.replace_failed(known=error.engines):
                    raise UserError(str(error)) from error

    def resume(self, tag: str) -> None:
        """Take back memory that was released: "weights" or "kv_cache"."""
        self._group.resume(tag)

    def check_probe(self, probe: Probe | None) -> None:
        """Compare log-probs of the probe's tokens where checksums do not show everything."""
        for engine in self._group.infos:
            if probe is not None and engine.kind == "sglang":
                check_probe(engine, probe)

    def stop(self) -> None:
        self._group.stop()

    def _generate_with(self, engines: list[EngineInfo]) -> None:
        urls = [engine.url for engine in engines]
        router = self._group.route(urls)
        self._watch.call(self._manager, lambda manager: manager.set_engines(urls, router))

    def _on_start_message(self, text: str) -> None:
        self._recorder.message(text)
        self._watch.check()
