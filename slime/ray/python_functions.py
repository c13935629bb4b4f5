"""Functions given to `slime.train`: written to the run folder, and called there by the run's processes.

RUN_DIR/inputs/functions.pkl   the reward functions by name and the generate function, by cloudpickle

Unpickling runs code. The file is the user's own program, written by the process that starts the run and
never derived from model output. It begins with its HMAC under a key in the user's home, so that a file
from another user's run folder is refused; key and file must be private to this user.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ray import cloudpickle

from slime.core.errors import ConfigError, UserError
from slime.core.types import Sample
from slime.utils.untrusted_files import (
    SIGNATURE_BYTES,
    is_signed,
    read_private,
    read_regular,
    sign,
    write_private,
)

REWARD_KEY = "reward"  # of the sum of several reward functions
_TRL = ("prompts", "completions")  # parameters of TRL's reward functions
_FILE = "functions.pkl"
_MAX_BYTES = 1 << 30


@dataclass(kw_only=True, frozen=True)
class Functions:
    rewards: dict[str, Callable[..., Any]] = field(default_factory=dict)
    generate: Callable[..., Any] | None = None

    @property
    def reward_key(self) -> str | None:
        return REWARD_KEY if len(self.rewards) > 1 else None


def make_functions(reward: Any, generate: Callable[..., Any] | None) -> Functions:
    """Name and check the functions: `reward` is None, a function or several of them."""
    given = [] if reward is None else reward if isinstance(reward, list | tuple) else [reward]
    rewards: dict[str, Callable[..., Any]] = {}
    for fn in given:
        _call_form(fn)
        name = getattr(fn, "__name__", type(fn).__name__).strip("<>")
        taken = {*rewards, REWARD_KEY} if len(given) > 1 else {*rewards}
        rewards[name if name not in taken else f"{name}_{len(rewards) + 1}"] = fn
    if generate is not None and not inspect.iscoroutinefunction(generate):
        raise ConfigError("generate: expected async def generate(args, sample, sampling_params)")
    return Functions(rewards=rewards, generate=generate)


def store(functions: Functions, folder: Path) -> None:
    """Write the functions to the folder; a module of this process is stored by name, `__main__` by value."""
    try:
        content = cloudpickle.dumps(functions)  # type: ignore[reportPrivateImportUsage]
    except Exception as error:
        raise ConfigError(f"a function cannot be sent to the run's processes: {error}") from None
    _write_signed(folder / _FILE, content)


@cache
def load(folder: Path) -> Functions:
    """Read what `store` has written for this user."""
    path = folder / _FILE
    if not path.exists():
        raise UserError(
            f"{path} does not exist: this run was started from Python and uses its functions. Continue "
            "it in its own folder, or name functions by --custom-rm-path"
        )
    stored = read_private(path)
    signature, content = stored[:SIGNATURE_BYTES], stored[SIGNATURE_BYTES:]
    if not is_signed(content, signature):
        raise UserError(
            f"{path} is not loaded: it holds code that this user did not store. To run it "
            f"anyway: slime.load_run({str(folder.parent)!r}, trust=True)"
        )
    return cloudpickle.loads(content)


def adopt(folder: Path) -> None:
    """Sign the functions that another user, or this user with another home, has stored in the folder."""
    path = folder / _FILE
    if path.exists():
        _write_signed(path, read_regular(path, _MAX_BYTES)[SIGNATURE_BYTES:])


def _write_signed(path: Path, content: bytes) -> None:
    """Replace the file as a whole: a full disk leaves the old one."""
    new = path.with_name(f".{path.name}.tmp")
    new.unlink(missing_ok=True)
    write_private(new, sign(content) + content)
    new.replace(path)


def reward(args: Any, sample: Sample) -> Any:
    """Score a sample with the run's functions (--custom-rm-path); called in a thread."""
    return score(load(Path(args.run_dir) / "inputs"), args, sample)


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Call the run's function (--custom-generate-function-path)."""
    fn = load(Path(args.run_dir) / "inputs").generate
    assert fn is not None
    extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(fn).parameters else {}
    return await fn(args, sample, sampling_params, **extra)


def score(functions: Functions, args: Any, sample: Sample) -> Any:
    """Return the reward, or an awaitable of it if a function is async.

    The value of a single function is returned as it is. Of several it is their sum, with each as a
    component: {"reward": 1.5, "accuracy": 1.0, "format": 0.5}; None counts as 0.
    """
    values = {name: _call(fn, args, sample) for name, fn in functions.rewards.items()}
    if any(inspect.isawaitable(value) for value in values.values()):
        return _score_async(values)
    return _combine(values)


async def _score_async(values: dict[str, Any]) -> Any:
    async def wait(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    done = await asyncio.gather(*map(wait, values.values()))
    return _combine({name: _single(value) for name, value in zip(values, done, strict=True)})


def _combine(values: dict[str, Any]) -> Any:
    if len(values) == 1:
        return next(iter(values.values()))
    numbers = {name: 0.0 if value is None else float(value) for name, value in values.items()}
    return {REWARD_KEY: sum(numbers.values()), **numbers}


def _call(fn: Callable[..., Any], args: Any, sample: Sample) -> Any:
    form = _call_form(fn)
    if form == "sample":
        return fn(sample)
    if form == "args, sample":
        return fn(args, sample)
    prompt, completion = sample.metadata.get("prompt", sample.prompt), sample.response
    if isinstance(prompt, list):  # as TRL writes completions of conversations
        completion = [{"role": "assistant", "content": completion}]
    columns = {name: [value] for name, value in sample.metadata.items()}
    columns |= {"prompts": [prompt], "completions": [completion]}
    parameters = inspect.signature(fn).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        columns = {name: value for name, value in columns.items() if name in parameters}
    return _single(fn(**columns))


def _single(value: Any) -> Any:
    """Return the only item of a list: functions in TRL's form return one reward per completion."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _call_form(fn: Any) -> str:
    """Return how a reward function is called: "sample", "args, sample" or "completions"."""
    expected = "expected reward(sample), reward(args, sample) or reward(completions, **columns)"
    if not callable(fn) or inspect.isclass(fn):
        raise ConfigError(f"reward: {fn!r} is not a function; {expected}")
    parameters = inspect.signature(fn).parameters
    if any(name in parameters for name in _TRL):
        return "completions"
    for form in ("sample", "args, sample"):
        try:
            inspect.signature(fn).bind(*form.split(", "))
            return form
        except TypeError:
            continue
    raise ConfigError(f"reward: {fn!r} has the wrong parameters; {expected}")
