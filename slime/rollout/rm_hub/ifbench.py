"""`--rm-type ifbench`: 1 if the response follows every instruction of its prompt, else 0.

`metadata["instruction_id_list"]` names the instructions and `metadata["kwargs"]` holds the arguments of
each, as the files of IFEval (Zhou et al. 2023, arXiv:2311.07911) have them. The checks run in a worker.
"""

from __future__ import annotations

from slime.core.errors import UserError
from slime.core.types import Sample
from slime.rollout.rm_hub.settings import RewardArgs, isolated
from slime.rollout.rm_hub.workers import workers

TIME_LIMIT_S = 10.0
_MAX_CHARS = 200_000


async def reward(args: RewardArgs, sample: Sample) -> float:
    ids = sample.metadata.get("instruction_id_list")
    if not isinstance(ids, list) or not ids:
        raise UserError(
            f'sample {sample.index}: the ifbench reward needs metadata["instruction_id_list"], a list '
            'of instruction ids, and metadata["kwargs"], a list of their arguments'
        )
    given = sample.metadata.get("kwargs") or [{}] * len(ids)
    if len(given) != len(ids):
        raise UserError(f"sample {sample.index}: {len(ids)} instruction ids, {len(given)} kwargs")
    response = sample.response.rsplit("</think>", 1)[-1][:_MAX_CHARS]
    pool = workers("instructions", time_limit_s=TIME_LIMIT_S, isolate=isolated(args))
    return float(bool(await pool.ask([response, ids, given])))
