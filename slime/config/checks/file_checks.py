"""Files and packages a run needs; for a dry run, which may describe another machine, only warnings."""

from __future__ import annotations

import re
from pathlib import Path

from slime.config.checks.installed import is_installed
from slime.config.checks.prompt_file_checks import data_path, need_data
from slime.config.checks.sglang_checks import check_installed
from slime.config.flags.draft import Draft
from slime.config.flags.registry import own_flags
from slime.config.flags.rollout import SFT_ROLLOUT
from slime.config.flags.spec import option_of
from slime.core.errors import ConfigError


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
    check_installed(draft)
    for name, package in (("use_wandb", "wandb"), ("use_tensorboard", "tensorboard")):
        if draft[name] and not is_installed(package):
            draft.lacking(f"{option_of(name)} needs the package {package}: pip install {package}")
    paths = [*(draft["prompt_data"] or []), *(d.path for d in draft["eval_datasets"])]
    parquet = [path for path in paths if data_path(path).endswith(".parquet")]
    if parquet and not is_installed("pyarrow"):
        draft.lacking(f"{parquet[0]} needs the package pyarrow: pip install pyarrow")
