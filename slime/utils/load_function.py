"""Load user hooks by import path, and check them against the Protocol that describes the call."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

from slime.core.errors import ConfigError, UserError


@cache
def load_function(
    path: str, *, flag: str, protocol: type, must_be_async: bool = False
) -> Callable[..., Any]:
    """Return the function at `package.module.name`; it must accept the call of `protocol.__call__`.

    A parameter with a default in the Protocol is optional, and so is `**kwargs`: hooks may omit them,
    and callers check `accepts(fn, name)` before passing one.
    """
    fn = _import(path, flag)
    expected = (
        f"{'async ' if must_be_async else ''}def {path.rsplit('.', 1)[-1]}{_render(protocol)}"
    )
    if not callable(fn) or inspect.isclass(fn):
        raise ConfigError(
            f"{flag} {path} is a {type(fn).__name__}; expected a function\n  {expected}"
        )
    problem = _binding_problem(fn, protocol.__call__)
    if problem is None and must_be_async and inspect.isfunction(fn) and not is_async(fn):
        problem = "it is not an async function"
    if problem is not None:
        raise ConfigError(
            f"{flag} {path} has the wrong signature: {problem}\n"
            f"  expected: {expected}\n  found:    {_found(fn, path)}"
        )
    return fn


@cache
def load_hook(path: str, *, flag: str, protocol: type) -> Callable[..., Any]:
    """Return `load_function`'s result, whose exceptions are raised as UserError with the flag and the line."""
    fn = load_function(path, flag=flag, protocol=protocol)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            raise UserError(_hook_failed(flag, path, error)) from error

    return call


@cache
def load_class(path: str, *, flag: str, protocol: type) -> type:
    """Return the class at `package.module.name`; it must have the methods of the Protocol."""
    cls = _import(path, flag)
    if not inspect.isclass(cls):
        raise ConfigError(
            f"{flag} {path} is a {type(cls).__name__}; expected a class with the methods "
            f"{', '.join(_methods(protocol))}"
        )
    for name in _methods(protocol):
        expected = f"def {name}{_render(protocol, name)}"
        method = inspect.getattr_static(cls, name, None)
        inherited = [object] if name == "__init__" else [object, protocol]
        if method in [None, *(inspect.getattr_static(base, name, None) for base in inherited)]:
            raise ConfigError(f"{flag} {path} has no method {name}; expected\n  {expected}")
        problem = _binding_problem(getattr(cls, name), getattr(protocol, name), bound=False)
        if problem is not None:
            raise ConfigError(
                f"{flag} {path}: method {name} has the wrong signature: {problem}\n"
                f"  expected: {expected}"
            )
    return cls


def accepts(fn: Callable[..., Any], name: str) -> bool:
    """Return whether `fn` takes the keyword `name`."""
    parameters = inspect.signature(fn).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def is_async(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(fn)) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None)  # noqa: B004  (an instance with an async __call__)
    )


def _import(path: str, flag: str) -> Any:
    if "/" in path or path.endswith(".py"):
        stem = path.rsplit("/", 1)[-1].split(".")[0] or "module"
        raise ConfigError(
            f"{flag} {path}: expected an import path such as {stem}.function, not a file"
        )
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{flag} {path}: expected an import path such as package.module.{path}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{flag} {path}: module {error.name!r} does not exist "
                f"(current folder {os.getcwd()}; add the folder that holds it to PYTHONPATH)"
            ) from None
        raise ConfigError(_import_failed(flag, path, module_name, error)) from error
    except Exception as error:
        raise ConfigError(_import_failed(flag, path, module_name, error)) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {module_name}.{near[0]}?" if near else ""
        raise ConfigError(f"{flag} {path}: module {module_name} has no {name!r}{hint}")
    return getattr(module, name)


def _hook_failed(flag: str, path: str, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the wrapper's own
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    where = "".join(f" at {f.filename}:{f.lineno} ({f.line})" for f in (own or frames)[-1:])
    return (
        f"{flag} {path} failed{where}: {type(error).__name__}: {error}\n"
        "The log of its process, in logs/ of the run folder, has the full traceback."
    )


def _import_failed(flag: str, path: str, module_name: str, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else module_name
    return (
        f"{flag} {path}: importing {module_name} failed at {where}: {type(error).__name__}: {error}"
    )


def _binding_problem(
    fn: Callable[..., Any], call: Callable[..., Any], bound: bool = True
) -> str | None:
    """Return why `fn` cannot take the call, or None; `call` is a Protocol's method, with `self` first."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins without a signature: nothing to check
        return None
    positional, keywords = [] if bound else [None], {}
    for parameter in list(inspect.signature(call).parameters.values())[1:]:
        if parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[parameter.name] = None
        elif parameter.kind is not parameter.VAR_KEYWORD:
            positional.append(None)
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def _render(protocol: type, name: str = "__call__") -> str:
    """Format the parameters of a Protocol's method: `(args, sample, *, evaluation=False)`."""
    signature = inspect.signature(getattr(protocol, name))
    parameters = [
        p.replace(annotation=p.empty)
        for p in list(signature.parameters.values())[name == "__call__" :]
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _found(fn: Callable[..., Any], path: str) -> str:
    return f"{'async ' if is_async(fn) else ''}def {path.rsplit('.', 1)[-1]}{inspect.signature(fn)}"


def _methods(protocol: type) -> list[str]:
    """Return the public methods of a Protocol in order, with `__init__` and `__len__` if declared."""
    return [
        name
        for name, value in vars(protocol).items()
        if inspect.isfunction(value)
        and (not name.startswith("_") or name in ("__init__", "__len__"))
        and getattr(value, "__qualname__", "").startswith(protocol.__name__)
    ]
