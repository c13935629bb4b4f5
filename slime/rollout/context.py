"""The state of a run that rollout functions, rewards and hooks share beyond their arguments.

Their public signatures take only `args`, so the state travels in one context variable. The RolloutManager
creates a RolloutContext and activates it around each call of a rollout function; every asyncio task and
every thread that slime starts inherits it. Threads that a hook starts use the one set by `share`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slime.core.errors import UserError
from slime.rollout.engine_pool import EnginePool
from slime.rollout.hook_calls import HookCalls
from slime.rollout.metrics import BusyClock, ProgressMonitor

T = TypeVar("T")


class WeightClock:
    """Predicts which weight version will train on a rollout; set after each weight update, from any thread.

    The engines hold `version`, and so does the trainer when it begins on rollout `next_rollout_id`.
    version=3, next_rollout_id=2, interval=1: rollout 2 is trained on with version 3, rollout 4 with 5.
    """

    def __init__(
        self, *, version: int | None = None, next_rollout_id: int = 0, interval: int = 1
    ) -> None:
        """`interval` is --update-weights-interval; `version` None: no update has been reported."""
        self.interval = interval
        self._now = None if version is None else (version, next_rollout_id)

    def set(self, version: int, next_rollout_id: int) -> None:
        self._now = (version, next_rollout_id)

    def trained_by(self, rollout_id: int) -> int | None:
        """Return the version that will train on the rollout; None if it is not known.

        One update follows every rollout r for which (r + 1) is divisible by the interval.
        """
        if self._now is None:
            return None
        version, next_rollout_id = self._now
        return version + max(rollout_id // self.interval - next_rollout_id // self.interval, 0)

    def updates_until(self, rollout_id: int, *, current_rollout_id: int) -> int:
        """Return how many weight updates come before training on `rollout_id`.

        If no version is known, one update per rollout from `current_rollout_id` on is assumed.
        """
        if self._now is None:
            return max(rollout_id - current_rollout_id, 0)
        _, next_rollout_id = self._now
        return max(rollout_id // self.interval - next_rollout_id // self.interval, 0)


@dataclass(kw_only=True)
class GenerationState:
    """What all requests of one rollout, or of one evaluation dataset, share."""

    seed_parts: tuple[object, ...] = ()  # empty: the engines choose random seeds
    keep_partial: bool = False  # continue an aborted response after its tokens, else restart it
    aborting: bool = False  # the batch is full: abort running requests and send no new ones
    hook_calls: HookCalls = field(default_factory=HookCalls)
    reward_clock: BusyClock = field(default_factory=BusyClock)


@dataclass(kw_only=True, frozen=True)
class RolloutContext:
    """`RolloutContext.current()` inside a rollout function, a reward or another hook of the rollout side."""

    pool: EnginePool  # of the model that is trained
    models: dict[str, EnginePool] = field(default_factory=dict)  # every served model by name
    clock: WeightClock = field(default_factory=WeightClock)
    progress: ProgressMonitor = field(default_factory=ProgressMonitor)
    generation: GenerationState | None = None  # None until a rollout function sets it
    _shared: dict[Hashable, Any] = field(default_factory=dict)

    @staticmethod
    def current() -> RolloutContext:
        context = _current.get() or _of_process
        if context is None:
            raise RuntimeError(
                "there is no rollout context here: run this inside "
                "`with RolloutContext(pool=EnginePool(urls)).active():`"
            )
        return context

    def share(self) -> None:
        """Make this the context of threads of this process that inherit none, such as a hook's own."""
        global _of_process
        _of_process = self

    @contextmanager
    def active(self) -> Iterator[RolloutContext]:
        """Make this the current context of the calling task or thread, and of those it starts."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def for_generation(self, generation: GenerationState) -> RolloutContext:
        """Return the same context for the requests of one rollout or evaluation dataset."""
        return replace(self, generation=generation)

    def model(self, name: str) -> EnginePool:
        """Return the engines of a model of --sglang-config."""
        if name not in self.models:
            known = ", ".join(self.models) or "none"
            raise UserError(f"no engine serves a model named {name!r}; models: {known}")
        return self.models[name]

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object of `key`, which is created on first use and kept for the rest of the run."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]


_current: ContextVar[RolloutContext | None] = ContextVar("rollout_context", default=None)
_of_process: RolloutContext | None = None


def current_generation() -> GenerationState:
    """Return the state of the current rollout; a fresh one outside of one, such as in a script that scores."""
    context = _current.get()
    generation = None if context is None else context.generation
    return generation or GenerationState()


def is_aborting() -> bool:
    return current_generation().aborting
