"""The values of a run while they are being resolved, each with where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from slime.config.flags.registry import own_flags
from slime.core.errors import ConfigError

Origin = Literal["default", "config", "command line", "derived"]


class Draft:
    """Defaults, overlaid by what the user gave; `derive` fills the rest, `checks` refuse.

    `draft["lr"]` is the value so far, `draft.given("lr")` says whether the user set it. `gpus` is what
    this machine has; with `cluster` there is one to join, which may have more. With `offline`, what this
    machine lacks is a warning: the run is meant for another one.
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
        self._defaults = {name: flag.default for name, flag in own_flags().items()}
        self.values: dict[str, Any] = {**self._defaults, **given}
        self.origins: dict[str, Origin] = dict(origins)
        self.warnings: list[str] = []
        self.gpus = gpus
        self.offline = offline
        self.cluster = cluster

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def given(self, name: str) -> bool:
        return name in self.origins and self.origins[name] != "derived"

    def given_names(self) -> list[str]:
        return [name for name in self.origins if self.given(name)]

    def default(self, name: str) -> Any:
        return self._defaults.get(name)

    def derive(self, name: str, value: Any) -> None:
        """Set a value the user did not give."""
        self.values[name] = value
        self.origins[name] = "derived"

    def derive_if_unset(self, name: str, value: Any) -> None:
        if self.values.get(name) is None and value is not None:
            self.derive(name, value)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def lacking(self, message: str) -> None:
        """Something this machine does not have: an error, or with `offline` a warning."""
        if not self.offline:
            raise ConfigError(message)
        self.warn(message)

    def need_file(self, path: str, option: str, hint: str = "") -> bool:
        if Path(path).expanduser().exists():
            return True
        self.lacking(f"{option}: {path} does not exist{hint}")
        return False
