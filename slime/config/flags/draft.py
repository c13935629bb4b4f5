"""The values of a run while they are being resolved, each with its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from slime.config.flags.registry import all_flags, own_flags
from slime.config.flags.values import nearest
from slime.core.errors import ConfigError

Origin = Literal["default", "config", "command line", "derived"]
_RESULTS = ("precision", "deterministic", "eval_datasets")  # derived, and not flags themselves


class Draft:
    """Defaults, overlaid by what the user gave; `derive` fills in the rest, `checks` raise.

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
        return name in self.origins and self.origins[name] != "derived"

    def given_names(self) -> list[str]:
        return [name for name in self.origins if self.given(name)]

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
        """Raise ConfigError about what this machine does not have; with `offline` only warn."""
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
            near = nearest(name, all_flags())
            raise KeyError(
                f"there is no flag {name!r}" + (f"; did you mean {near}?" if near else "")
            )
