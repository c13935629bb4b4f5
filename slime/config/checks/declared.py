"""Apply the rules on the flags' declarations: bounds, required, mutually exclusive, no effect."""

from __future__ import annotations

from slime.config.flags.draft import Draft
from slime.config.flags.registry import all_flags, own_flags
from slime.config.flags.run import phase_timeouts
from slime.config.flags.spec import Flag, option_of
from slime.core.errors import ConfigError


def check_values(draft: Draft) -> None:
    """Check single values. Runs before values are derived, so that deriving can rely on them."""
    for flag in all_flags().values():
        value = draft[flag.name]
        if flag.bounds and value is not None and not flag.allows(value):
            hint = f": {flag.hint}" if flag.hint else ""
            raise ConfigError(f"{flag.option} must be {flag.bounds}, not {value}{hint}")
    for flag in own_flags().values():
        _check_own(flag, draft)
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
    for name in draft.given_names():
        flag = all_flags()[name]
        if flag.needs and not flag.needs.holds(draft):
            note = f": {flag.needs.note}" if flag.needs.note else ""
            draft.warn(f"{flag.option} has no effect without {flag.needs.text}{note}")
        for condition in flag.unless:
            if condition.holds(draft):
                note = f", {condition.note}" if condition.note else ""
                draft.warn(f"{flag.option} has no effect with {condition.text}{note}")


def _check_own(flag: Flag, draft: Draft) -> None:
    value = draft[flag.name]
    if flag.required and value is None:
        raise ConfigError(f"{flag.option} is missing: give {flag.required}")
    chosen = value is not None and value is not False
    if flag.excludes and chosen and draft[flag.excludes]:
        other = option_of(flag.excludes)
        raise ConfigError(f"{flag.option} and {other} are mutually exclusive: remove one")
    if flag.kind == "json" and not isinstance(value, dict):
        raise ConfigError(f"""{flag.option} must be a JSON object, as in '{{"name": 1}}'""")
