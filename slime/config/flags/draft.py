"""The values of a run while they are being resolved, and the rules on the flags' declarations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

from slime.config.flags.registry import all_flags, own_flags
from slime.config.flags.run import phase_timeouts
from slime.config.flags.spec import Flag, did_you_mean, option_of
from slime.core.errors import ConfigError

# "custom": no flag, from --custom-config-path
# "own option": no flag, an option that the user's own script added
# "role file": from --megatron-config-path, which is read again when the run is repeated
Origin = Literal[
    "default", "config", "command line", "role file", "derived", "custom", "own option"
]
_NOT_GIVEN = ("derived", "custom", "own option")
_RESULTS = (
    "precision",
    "deterministic",
    "eval_datasets",
    "engine_models",
    "critic_overrides",
    "role_replaced",
)  # derived, and not flags themselves


class Draft:
    """Defaults, overridden by what the user gave; `derive` fills in the rest, `checks` raise.

    `draft["lr"]` is the value so far, `draft.given("lr")` says whether the user set it; a name that
    is no flag raises KeyError. `gpus` is what this machine has; with `cluster` there is a Ray cluster
    to join, which may have more. With `offline`, what this machine lacks is only a warning, because
    the run is meant for another machine.
    """

    def __init__(
        self,
        given: dict[str, Any],
        origins: dict[str, Origin],
        *,
        gpus: int,
        offline: bool = False,
        cluster: bool = False,
    ) -> None:
        defaults = {name: flag.default for name, flag in own_flags().items()}
        self.values: dict[str, Any] = {**defaults, **given}
        self.origins: dict[str, Origin] = dict(origins)
        self.warnings: list[str] = []
        self.gpus = gpus
        self.offline = offline
        self.cluster = cluster

    def __getitem__(self, name: str) -> Any:
        """Return the value; None for a flag of Megatron, SGLang or the router that is not set."""
        return self.values[name] if name in self.values else self._unset(name)

    def given(self, name: str) -> bool:
        if name not in self.values:
            self._unset(name)
        return name in self.origins and self.origins[name] not in _NOT_GIVEN

    def given_flags(self) -> list[Flag]:
        return [all_flags()[name] for name in self.origins if self.given(name)]

    @property
    def num_training_gpus(self) -> int:
        return self["actor_num_nodes"] * self["actor_num_gpus_per_node"]

    def view(self) -> Draft:
        """Return a copy with no warnings, in which other values can be checked."""
        copied = copy.copy(self)
        copied.values, copied.origins = dict(self.values), dict(self.origins)
        copied.warnings = []
        return copied

    def derive(self, name: str, value: Any) -> None:
        """Set a value that the user did not give."""
        if name not in _RESULTS and name not in self.values:
            self._unset(name)
        self.values[name] = value
        self.origins[name] = "derived"

    def derive_if_unset(self, name: str, value: Any) -> None:
        if self[name] is None and value is not None:
            self.derive(name, value)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def lacking(self, message: str) -> None:
        """Raise ConfigError about what this machine lacks; with `offline` only warn."""
        if not self.offline:
            raise ConfigError(message)
        self.warn(message)

    def need_file(self, path: str, option: str, hint: str = "") -> bool:
        if Path(path).expanduser().exists():
            return True
        self.lacking(f"{option}: {path} does not exist{hint}")
        return False

    @staticmethod
    def _unset(name: str) -> None:
        """Return None for a flag without a value; raise KeyError for a name that is no flag."""
        if name not in all_flags():
            raise KeyError(f"there is no flag {name!r}{did_you_mean(name, all_flags())}")


def check_values(draft: Draft) -> None:
    """Check single values. Runs before values are derived, so that deriving can rely on them."""
    for flag in all_flags().values():
        value = draft[flag.name]
        if flag.bounds and value is not None and not flag.allows(value):
            hint = f": {flag.hint}" if flag.hint else ""
            raise ConfigError(f"{flag.option} must be {flag.bounds}, not {value}{hint}")
    for flag in own_flags().values():
        check_own_flag(flag, draft)
    if draft["num_rollout"] is None and draft["num_epoch"] is None:
        raise ConfigError("how long to train is missing: give --num-rollout or --num-epoch")
    phase_timeouts(draft["phase_timeout_minutes"])
    for key, value in draft["train_env_vars"].items():
        if not isinstance(value, str):
            raise ConfigError(
                f"--train-env-vars: the value of {key} must be text: put it in quotes"
            )


def check_requirements(draft: Draft) -> None:
    """Raise ConfigError for a flag whose `requires` does not hold. Runs after values are derived."""
    for flag in own_flags().values():
        chosen = draft[flag.name] != flag.default
        if flag.requires and chosen and not flag.requires.holds(draft):
            note = f": {flag.requires.note}" if flag.requires.note else ""
            raise ConfigError(f"{flag.option} needs {flag.requires.text}{note}")


def warn_without_effect(draft: Draft) -> None:
    """Warn about every flag that the user set and that other flags leave without an effect."""
    for flag in draft.given_flags():
        if flag.ignored and draft[flag.name] != flag.default:
            draft.warn(f"{flag.option} has no effect: {flag.ignored}")
        if flag.needs and not flag.needs.holds(draft):
            note = f": {flag.needs.note}" if flag.needs.note else ""
            draft.warn(f"{flag.option} has no effect without {flag.needs.text}{note}")
        for condition in flag.unless:
            if condition.holds(draft):
                note = f", {condition.note}" if condition.note else ""
                draft.warn(f"{flag.option} has no effect with {condition.text}{note}")


def check_own_flag(flag: Flag, draft: Draft) -> None:
    value = draft[flag.name]
    if flag.required and value is None:
        raise ConfigError(f"{flag.option} is missing: give {flag.required}")
    chosen = value is not None and value is not False
    if flag.excludes and chosen and draft[flag.excludes]:
        other = option_of(flag.excludes)
        raise ConfigError(f"{flag.option} and {other} are mutually exclusive: remove one")
    if flag.kind == "json" and not isinstance(value, dict):
        raise ConfigError(f"""{flag.option} must be a JSON object, as in '{{"name": 1}}'""")
