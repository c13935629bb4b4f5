"""Resolve paths in flags, and store them in config.yaml so that the run can be repeated elsewhere.

`{run_dir}` in a path stands for --run-dir, so that a stored configuration repeats the run in another
folder instead of overwriting the first::

    --run-dir runs/first --save runs/first/checkpoints        the command line
    save: '{run_dir}/checkpoints'                             config.yaml
    --config runs/first/config.yaml --run-dir runs/second     saves to runs/second/checkpoints
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slime.config.datasets import DataSpec
from slime.config.flags.draft import Draft
from slime.config.flags.registry import foreign_flags
from slime.core.errors import ConfigError

RUN_DIR = "{run_dir}"
OUTPUTS = (
    "save",
    "critic_save",
    "save_hf",
    "save_debug_rollout_data",
    "save_debug_train_data",
    "update_weight_disk_dir",
    "wandb_dir",
    "tb_project_name",
)
_RESUMED_FROM = {"load": "save", "critic_load": "critic_save"}
_CHECKPOINTS = ("save", "critic_save", *_RESUMED_FROM)
_PATTERNS = ("save_hf", "save_debug_rollout_data", "save_debug_train_data")
_INPUTS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "eval_config")
_DATA = ("prompt_data", "eval_prompt_data")
_FOREIGN = re.compile(r"_(path|dir|file)$")


def resolve_paths(draft: Draft) -> None:
    """Replace {run_dir} in paths; make checkpoint folders absolute, so that they can be compared."""
    for name in (*OUTPUTS, *_RESUMED_FROM):
        value = draft[name]
        if not isinstance(value, str) or not value:
            continue
        run_dir = draft["run_dir"]
        if name in _PATTERNS:  # in which literal braces are doubled
            run_dir = run_dir.replace("{", "{{").replace("}", "}}")
        value = value.replace(RUN_DIR, run_dir)
        if name in _CHECKPOINTS:
            value = str(Path(value).expanduser().absolute())
        draft.values[name] = value


def portable(given: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Return the values for config.yaml: valid in another folder, and for another --run-dir.

    --load is omitted where it equals --save: it resumes one run and does not belong to a repetition.
    """
    kept = {name: value for name, value in given.items() if name not in _resume_only(given)}
    return {name: _portable(name, value, run_dir) for name, value in kept.items()}


def _resume_only(given: dict[str, Any]) -> set[str]:
    same = {
        load
        for load, save in _RESUMED_FROM.items()
        if load in given and given[load] == given.get(save)
    }
    return same | ({"ckpt_step"} if "load" in same else set())


def _portable(name: str, value: Any, run_dir: str) -> Any:
    if name in (*OUTPUTS, *_RESUMED_FROM) and isinstance(value, str):
        path = Path(value).expanduser().absolute()
        inside = path.is_relative_to(run_dir)
        return str(Path(RUN_DIR) / path.relative_to(run_dir) if inside else path)
    if name in _DATA and isinstance(value, list):  # --eval-prompt-data NAME PATH NAME PATH
        first = 0 if name == "prompt_data" else 1
        return [
            _absolute(item, _data_file(item)) if i % (first + 1) == first else item
            for i, item in enumerate(value)
        ]
    if name in _INPUTS or (name in foreign_flags() and _FOREIGN.search(name)):
        return _absolute(value, value) if isinstance(value, str) else value
    if name == "load_debug_rollout_data" and isinstance(value, str):
        return str(Path(value).expanduser().absolute())
    return value


def _absolute(value: str, file: str | None) -> str:
    """Return `value` below the current folder, if `file` exists there."""
    if file is None or Path(file).is_absolute() or not Path(file).exists():
        return value
    return str(Path.cwd() / value)


def _data_file(spec: str) -> str | None:
    try:
        parsed = DataSpec.parse(spec, "--prompt-data")
    except ConfigError:
        return None
    return parsed.path if parsed.task is None else None
