"""`--rm-type ifbench`: 1 if the response follows every instruction of its prompt, else 0.

`metadata["instruction_id_list"]` names the instructions and `metadata["kwargs"]` holds the arguments of
each, as the files of IFEval (Zhou et al. 2023, arXiv:2311.07911) have them.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.instructions import INSTRUCTIONS
from slime.utils.errors import UserError
from slime.utils.types import Sample

_LONGEST = 200_000  # characters


def grade(sample: Sample) -> float:
    ids = sample.metadata.get("instruction_id_list")
    if not isinstance(ids, list) or not ids:
        raise UserError(
            f'sample {sample.index}: the ifbench reward needs metadata["instruction_id_list"], a list '
            'of instruction ids, and metadata["kwargs"], a list of their arguments'
        )
    given = sample.metadata.get("kwargs") or [{}] * len(ids)
    if len(given) != len(ids):
        raise UserError(f"sample {sample.index}: {len(ids)} instruction ids, {len(given)} kwargs")
    response = sample.response.rsplit("</think>", 1)[-1][:_LONGEST]
    return float(
        all(follows(response, name, args or {}) for name, args in zip(ids, given, strict=True))
    )


def follows(response: str, instruction_id: str, arguments: dict[str, Any]) -> bool:
    """Whether the response follows one instruction; an empty response follows none."""
    check = INSTRUCTIONS.get(instruction_id)
    if check is None:
        raise UserError(
            f"unknown instruction id {instruction_id!r}: choose among {', '.join(INSTRUCTIONS)}"
        )
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(response.strip()) and check(response, **given)
    except TypeError as error:
        raise UserError(f"arguments of {instruction_id}: {error}") from None
