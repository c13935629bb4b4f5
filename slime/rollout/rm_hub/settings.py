"""The arguments that scoring reads, and the reward type of a sample."""

from __future__ import annotations

from typing import Any, Protocol

from slime.config.arguments import Args
from slime.config.datasets import DataSpec
from slime.config.reward_types import check_row_type
from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.utils.reasoning_tasks import METADATA_KEY

Reward = float | dict[str, Any]


class RewardArgs(Protocol):
    """The attributes that scoring needs; hooks may pass an object of their own."""

    rm_type: str | None
    custom_rm_path: str | None
    rm_url: str | None
    reward_key: str | None


def isolated(args: RewardArgs) -> bool:
    """Return whether code and answers of the model run in the sandbox (no --allow-unsandboxed-code)."""
    return not (isinstance(args, Args) and args.allow_unsandboxed_code)


def chosen_type(args: RewardArgs, sample: Sample) -> str:
    """Return the reward type of the sample: its own if the run allows it, else `--rm-type`.

    Metadata comes from data rows, so a type that the user did not allow is an error.
    """
    asked = sample.metadata.get("rm_type")
    if asked not in (None, ""):
        check_row_type(asked, _allowed(args, sample), f"sample {sample.index}")
        return asked
    if not args.rm_type:
        raise ConfigError("samples need a reward: set --rm-type or --custom-rm-path")
    return args.rm_type


def _allowed(args: RewardArgs, sample: Sample) -> list[str | None]:
    if not isinstance(args, Args):
        return [args.rm_type]
    task_type = ["reasoning_gym"] if _is_task_of_run(args, sample) else []
    return [args.rm_type, *args.allow_row_rm_types, *task_type]


def _is_task_of_run(args: Args, sample: Sample) -> bool:
    """Return whether the run names `reasoning-gym:<task>` with the task of this sample."""
    origin = sample.metadata.get(METADATA_KEY)
    paths = [*(args.prompt_data or []), *(dataset.path for dataset in args.eval_datasets)]
    tasks = [DataSpec.parse(path).task for path in paths]
    return isinstance(origin, dict) and origin.get("task") is not None and origin["task"] in tasks
