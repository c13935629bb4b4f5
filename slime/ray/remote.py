"""Typed handles on objects that live in Ray actors.

    manager = Remote(options, rollout_manager, args, token)            # Remote[RolloutManager]
    reference = manager.call(lambda manager: manager.generate(7))      # ObjectRef[RolloutResult]

The class is imported in the actor's process only: importing torch and transformers in the driver too would
take several seconds. Yet a type checker
follows the call to `RolloutManager.generate` and checks its arguments: the lambda is called here with a
recorder in place of the object, and the one method call that it records is sent to the actor. A reference
among the arguments arrives as its value, see `value_of`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from slime.diagnosis.process_status import in_phase, serve_status
from slime.diagnosis.run_monitor import HeadWatch
from slime.ray.local_ray import adopt, dead_process, take_variables
from slime.utils.gc_tuning import collector_off

if TYPE_CHECKING:
    from slime.backends.base import TrainRayActor
    from slime.ray.engine_actor import EngineActor
    from slime.ray.rollout import RolloutManager

logger = logging.getLogger(__name__)

# What Ray raises for a call of an actor that died; the second if its memory monitor killed it.
ACTOR_DIED = (RayActorError, OutOfMemoryError)
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process runs."""

    pid: int
    node: str  # Ray's id
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Remote(Generic[T]):
    """A handle on an object of class T in an actor of its own."""

    def __init__(
        self,
        options: dict[str, Any],
        load: Callable[[], Callable[P, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ):
        """Start an actor with Ray's `options`; it calls `load` for the class, then the class."""
        options, variables = take_variables(options)
        self._actor: Any = _Host.options(**options).remote(variables, load, *args, **kwargs)
        self._place_reference = self._actor.place.remote()
        self._place: Place | None = None

    def call(self, method: Callable[[T], R]) -> ray.ObjectRef[R]:
        """Send one method call, written as a lambda, and return the reference of its result."""
        recorded = _record(method)
        return self._actor.call.remote(recorded.name, *recorded.args, **recorded.kwargs)

    def get(self, method: Callable[[T], R], *, timeout: float | None = None) -> R:
        return ray.get(self.call(method), timeout=timeout)

    def place(self, timeout: float = 0) -> Place | None:
        """Return where the process runs; None before it has started."""
        if self._place is None and ray.wait([self._place_reference], timeout=timeout)[0]:
            with suppress(RayError):  # it died at its start
                self._place = ray.get(self._place_reference)
        return self._place

    def ping(self) -> ray.ObjectRef[Place]:
        """Return a reference that is ready when the process has nothing else to do, or is dead."""
        return self._actor.place.remote()

    def kill(self) -> None:
        if dead_process() is None:  # Ray would wait a minute; the actor ends with the run
            ray.kill(self._actor)


def fetch(references: list[Any]) -> list[Any]:
    """Return the values from Ray's object store."""
    return ray.get(references)


def value_of(reference: ray.ObjectRef[R]) -> R:
    """Type a reference as the value that the actor receives: Ray resolves it there."""
    return cast(R, reference)


@dataclass(frozen=True, kw_only=True)
class _MethodCall:
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder:
    """Stands in for an actor's object; a method returns a record of its call."""

    def __getattr__(self, name: str) -> Callable[..., _MethodCall]:
        return lambda *args, **kwargs: _MethodCall(name=name, args=args, kwargs=kwargs)


def _record(method: Callable[[Any], Any]) -> _MethodCall:
    recorded = method(_Recorder())
    if not isinstance(recorded, _MethodCall):
        raise TypeError("a remote call is one method call: `lambda actor: actor.method(...)`")
    return recorded


@ray.remote
class _Host:
    """The actor. The first call raises an error of its constructor: Ray would only report a dead actor."""

    def __init__(
        self, variables: dict[str, str], load: Callable[[], Any], *args: Any, **kwargs: Any
    ):
        adopt(variables)
        serve_status()
        if ray.is_initialized():  # otherwise the runtime context would start Ray
            HeadWatch(ray.get_runtime_context().gcs_address)
        self._error: Exception | None = None
        try:
            with in_phase(f"starting {load.__name__}"):
                with collector_off():
                    make = load()
                self._object = make(*args, **kwargs)
        except Exception as error:
            self._error = error

    def place(self) -> Place:
        context = ray.get_runtime_context()
        return Place(
            pid=os.getpid(), node=context.get_node_id(), host=ray.util.get_node_ip_address()
        )

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._error is not None:
            raise self._error
        try:
            with in_phase(method):
                return getattr(self._object, method)(*args, **kwargs)
        except Exception:
            # The driver gets the error of the first rank only; the log of each rank has its own.
            logger.exception("%s failed", method)
            raise


# ---- the classes that run as actors; each function is called in the actor's process only


def rollout_manager() -> type[RolloutManager]:
    from slime.ray.rollout import RolloutManager

    return RolloutManager


def engine_actor() -> type[EngineActor]:
    from slime.ray.engine_actor import EngineActor

    return EngineActor


def trainer(backend: str) -> Callable[[], type[TrainRayActor]]:
    """Return the function that imports the trainer of `--train-backend`."""
    return {"fsdp": fsdp_trainer, "megatron": megatron_trainer}[backend]


def fsdp_trainer() -> type[TrainRayActor]:
    from slime.backends.fsdp_utils.actor import FSDPTrainRayActor

    return FSDPTrainRayActor


def megatron_trainer() -> type[TrainRayActor]:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    return MegatronTrainRayActor
