"""Ray actors around plain objects that are imported in their own process.

The driver places processes and waits; importing torch and transformers there as well would cost it,
and a small machine that starts all processes at once, several seconds.
"""

from __future__ import annotations

import importlib
from typing import Any

import ray


class Remote:
    """A handle: `Remote(options, "package.module.Class", ...).call("method", ...)` is a reference."""

    def __init__(self, options: dict[str, Any], path: str, *args: Any, **kwargs: Any):
        self._actor = _Host.options(**options).remote(path, *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        return self._actor.call.remote(method, *args, **kwargs)

    def get(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        return ray.get(self.call(method, *args, **kwargs), timeout=timeout)

    def kill(self) -> None:
        ray.kill(self._actor)


@ray.remote
class _Host:
    """An error in the constructor is raised by the first call: Ray would only report a dead actor."""

    def __init__(self, path: str, *args: Any, **kwargs: Any):
        module, name = path.rsplit(".", 1)
        self._error: Exception | None = None
        try:
            self._object = getattr(importlib.import_module(module), name)(*args, **kwargs)
        except Exception as error:
            self._error = error

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._error is not None:
            raise self._error
        return getattr(self._object, method)(*args, **kwargs)
