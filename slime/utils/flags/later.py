"""What the parser knows but this version does not do yet; each use is refused with a plain sentence.

The one list to shrink when a capability arrives: take its line out.
"""

from __future__ import annotations

from slime.utils.errors import ConfigError
from slime.utils.flags.draft import Draft
from slime.utils.flags.spec import option_of

# Setting one of these, to anything but its default, is refused.
LATER: dict[str, str] = {}

# These values of a flag are refused, also where the value is the flag's default.
LATER_VALUES: dict[tuple[str, str], str] = {}


def refuse_later(draft: Draft) -> None:
    """Runs after every other check, so that a command line that is wrong anyway hears that first."""
    for name, advice in LATER.items():
        if draft.given(name) and draft[name] != draft.default(name):
            raise ConfigError(f"{option_of(name)} is not available in this version: {advice}")
    for (name, value), advice in LATER_VALUES.items():
        if str(draft[name] or "").removeprefix("boxed_") == value:
            raise ConfigError(
                f"{option_of(name)} {value} is not available in this version: {advice}"
            )
