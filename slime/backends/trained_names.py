"""Select trained parameters by --only-train-params-name-list and --freeze-params-name-list."""

from __future__ import annotations

import re
from typing import NoReturn

from slime.core.errors import ConfigError


def trained_names(names: list[str], only: list[str] | None, freeze: list[str] | None) -> list[str]:
    kept = [name for name in names if is_trained(name, only, freeze)]
    return kept or refuse_nothing_trained(names)


def is_trained(name: str, only: list[str] | None, freeze: list[str] | None) -> bool:
    wanted = only is None or any(re.search(pattern, name) for pattern in only)
    return wanted and not any(re.search(pattern, name) for pattern in freeze or ())


def refuse_nothing_trained(names: list[str]) -> NoReturn:
    raise ConfigError(
        "--only-train-params-name-list and --freeze-params-name-list leave no parameter to train; "
        f"names look like {names[0]!r} and {names[-1]!r}"
    )
