"""Choose which buffered groups to use first (`--buffer-filter-path`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.core.types import Group

if TYPE_CHECKING:
    from slime.config.arguments import Args


def pop_first(
    args: Args, rollout_id: int | None, buffer: list[Group], num_samples: int
) -> list[Group]:
    """Remove and return the oldest groups."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
