"""Files and packages that a run needs: the model's folder, prompt files, optional packages.

In a dry run, which may describe another machine, what is missing is only a warning.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slime.config.datasets import DataSpec
from slime.config.flags.draft import Draft
from slime.config.flags.registry import own_flags
from slime.config.flags.rollout import SFT_ROLLOUT
from slime.config.flags.spec import option_of
from slime.config.installed import is_installed
from slime.core.errors import ConfigError
from slime.utils.reasoning_tasks import chosen_rows


def check_files(draft: Draft) -> None:
    _check_model(draft)
    if draft["ref_load"] is not None:
        draft.need_file(draft["ref_load"], "--ref-load")
    if draft["critic_load"] not in (None, draft["critic_save"]):
        draft.need_file(draft["critic_load"], "--critic-load")
    if draft["use_opd"] and draft["opd_type"] == "megatron":
        draft.need_file(draft["opd_teacher_load"], "--opd-teacher-load")
    _check_prompts(draft)
    for dataset in draft["eval_datasets"]:
        option = f"--eval-prompt-data {dataset.name}"
        need_data(dataset.path, draft, option)
    pattern = draft["load_debug_rollout_data"]
    if pattern is not None:
        path = pattern if "{" not in pattern else str(Path(pattern.split("{")[0] + "x").parent)
        draft.need_file(path, "--load-debug-rollout-data")
    _check_packages(draft)


def _check_model(draft: Draft) -> None:
    folder = draft["hf_checkpoint"]
    hint = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", folder):
        hint = f": if it is a model of the Hugging Face Hub, run `hf download {folder} --local-dir {folder}`"
    if not draft.need_file(folder, "--hf-checkpoint", hint):
        return
    if not (Path(folder) / "config.json").is_file():
        draft.lacking(
            f"--hf-checkpoint: {folder} holds no config.json: give the folder of a Hugging Face model"
        )


def _check_prompts(draft: Draft) -> None:
    specs = draft["prompt_data"] or []
    flags = own_flags()
    built_in = draft["data_source_path"] == flags["data_source_path"].default and draft[
        "rollout_function_path"
    ] in (flags["rollout_function_path"].default, SFT_ROLLOUT)
    if not specs and built_in and not draft["debug_train_only"]:
        raise ConfigError("--prompt-data is missing: give a jsonl or parquet file with prompts")
    for spec in specs:
        need_data(spec, draft, "--prompt-data")


def _check_packages(draft: Draft) -> None:
    for name, package in (("use_wandb", "wandb"), ("use_tensorboard", "tensorboard")):
        if draft[name] and not is_installed(package):
            draft.lacking(f"{option_of(name)} needs the package {package}: pip install {package}")
    paths = [*(draft["prompt_data"] or []), *(d.path for d in draft["eval_datasets"])]
    parquet = [path for path in paths if data_path(path).endswith(".parquet")]
    if parquet and not is_installed("pyarrow"):
        draft.lacking(f"{parquet[0]} needs the package pyarrow: pip install pyarrow")


def read_hf_config(draft: Draft) -> dict[str, Any]:
    """Return the text model's part of config.json, read as plain JSON; empty if there is no file."""
    folder = draft["hf_checkpoint"]
    path = Path(folder) / "config.json" if folder else None
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"--hf-checkpoint: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-checkpoint: {path} does not hold a model's settings")
    return config.get("text_config", config)


def data_path(spec: str, option: str = "--prompt-data") -> str:
    """Return the path in a spec: 'data.jsonl' for 'data.jsonl@[0:100]:weight=2'."""
    return str(Path(DataSpec.parse(spec, option).path).expanduser())


def need_data(spec: str, draft: Draft, option: str) -> None:
    """Check that the dataset's file, or the package of its task, exists."""
    if DataSpec.parse(spec, option).task is None:
        draft.need_file(data_path(spec, option), option)
    elif not is_installed("reasoning_gym"):
        draft.lacking(f"{option} {spec} needs a package: pip install 'slime[reasoning-gym]'")


def count_prompts(text: str, draft: Draft) -> int:
    """Return the number of prompts in one pass over the data, before any filter by length."""
    spec, path = DataSpec.parse(text), data_path(text)
    if spec.task is not None:
        return round(len(chosen_rows(spec.rows)) * spec.weight)
    if not draft.need_file(path, "--prompt-data"):
        return 0
    if path.endswith(".parquet"):
        if not is_installed("pyarrow"):
            draft.lacking(f"{path} needs the package pyarrow: pip install pyarrow")
            return 0
        import pyarrow.parquet

        count = pyarrow.parquet.ParquetFile(path).metadata.num_rows
    else:
        with open(path, "rb") as file:
            count = sum(1 for line in file if line.strip())
    return round(len(range(count)[spec.rows]) * spec.weight)
