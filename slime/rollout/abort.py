"""Ends the generation of groups that are under way, keeping what they have where that is wanted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from slime.core.types import Group, Status
from slime.rollout.engine_pool import current_pool
from slime.rollout.generate_call import Run

logger = logging.getLogger(__name__)

_ABORT_EVERY_S = 1.0
_ABORT_DEADLINE_S = 60.0


async def end_all(running: Mapping[asyncio.Task[Group], Group], run: Run) -> list[Group]:
    """Abort the tasks; the groups in order, with what they have so far if the run keeps partial ones.

    `running` maps each task to its group as it was taken from the data source.
    """
    if not running:
        return []
    run.aborting = True
    if run.keep_partial:
        await _abort_until_done(running)
    else:
        await current_pool().abort_all()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    groups = [
        _as_far_as_it_came(task, group) if run.keep_partial else group
        for task, group in running.items()
    ]
    return sorted(groups, key=lambda group: group[0].group_index or 0)


async def _abort_until_done(running: Mapping[asyncio.Task[Group], Group]) -> None:
    """Repeated: a request that was on its way when an engine aborted all it had is not among them."""
    for _ in range(round(_ABORT_DEADLINE_S / _ABORT_EVERY_S)):
        await current_pool().abort_all()
        _, left = await asyncio.wait(running, timeout=_ABORT_EVERY_S)
        if not left:
            return
    logger.warning("%d groups did not end when aborted; they start over", len(left))


def _as_far_as_it_came(task: asyncio.Task[Group], taken: Group) -> Group:
    """The group with what it has so far where that may be continued, else as it was taken."""
    if not task.cancelled() and task.exception() is None:
        group = task.result()
        if len(group) == len(taken) and not any(s.status == Status.FAILED for s in group):
            return group
    return taken
