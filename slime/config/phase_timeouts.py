"""How long each phase of a run may take before it counts as stuck."""

from __future__ import annotations

from slime.core.errors import ConfigError

# Minutes. Generous: reading a checkpoint of hundreds of gigabytes, answers of an hour.
DEFAULTS = {
    "start": 120.0,
    "generate": 240.0,
    "log_probs": 120.0,
    "train": 240.0,
    "update_weights": 60.0,
    "save": 120.0,
    "eval": 240.0,
}


def phase_timeouts(minutes: dict[str, float]) -> dict[str, float]:
    """Seconds of every phase; `minutes` override the defaults."""
    for name, value in minutes.items():
        if name not in DEFAULTS:
            raise ConfigError(
                f"--phase-timeout-minutes: there is no phase {name!r}; one of {', '.join(DEFAULTS)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(
                f"--phase-timeout-minutes: {name} must be a number above 0, not {value}"
            )
    return {name: 60.0 * minutes.get(name, default) for name, default in DEFAULTS.items()}
