"""Ray actors around plain objects that are imported in their own process.

The driver places processes and waits; importing torch and transformers there as well would cost it,
and a small machine that starts all processes at once, several seconds.
"""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from slime.diagnosis.head_watch import HeadWatch
from slime.diagnosis.process_status import answer_questions, doing
from slime.ray.local_ray import adopt, dead_process, take_variables
from slime.utils.gc_tuning import collector_off

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process runs."""

    pid: int
    node: str  # Ray's id
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Remote:
    """A handle: `Remote(options, "package.module.Class", ...).call("method", ...)` is a reference."""

    def __init__(self, options: dict[str, Any], path: str, *args: Any, **kwargs: Any):
        options, variables = take_variables(options)
        self._actor = _Host.options(**options).remote(variables, path, *args, **kwargs)
        self._asked_place = self._actor.place.remote()
        self._place: Place | None = None

    def call(self, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        return self._actor.call.remote(method, *args, **kwargs)

    def get(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return ray.get(self.call(method, *args, **kwargs), timeout=timeout)

    def place(self, timeout: float = 0) -> Place | None:
        """None while the process has not started."""
        if self._place is None and ray.wait([self._asked_place], timeout=timeout)[0]:
            with suppress(ray.exceptions.RayError):  # it died before it could say
                self._place = ray.get(self._asked_place)
        return self._place

    def ping(self) -> ray.ObjectRef:
        """Ready when the process has nothing else to do, or is dead."""
        return self._actor.place.remote()

    def kill(self) -> None:
        if dead_process() is None:  # Ray would wait for it a minute; the actor ends with the run
            ray.kill(self._actor)


@ray.remote
class _Host:
    """An error in the constructor is raised by the first call: Ray would only report a dead actor."""

    def __init__(self, variables: dict[str, str], path: str, *args: Any, **kwargs: Any):
        adopt(variables)
        answer_questions()
        if ray.is_initialized():  # asking for the context would start a Ray otherwise
            HeadWatch(ray.get_runtime_context().gcs_address)
        module, name = path.rsplit(".", 1)
        self._error: Exception | None = None
        try:
            with doing(f"starting {name}"):
                with collector_off():
                    imported = importlib.import_module(module)
                self._object = getattr(imported, name)(*args, **kwargs)
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
            with doing(method):
                return getattr(self._object, method)(*args, **kwargs)
        except Exception:
            # The driver hears of the first rank that fails; each one's own log says why it did.
            logger.exception("%s failed", method)
            raise
