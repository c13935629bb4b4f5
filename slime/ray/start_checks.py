"""Checks before any process of a run starts: hooks, model, data, and the folders to write to."""

from __future__ import annotations

from pathlib import Path

from slime.backends.param_names import check_freezing
from slime.config.arguments import Args
from slime.config.checks.file_checks import (
    check_chat_template,
    check_tokenizer,
    check_weights,
    check_writable,
    weight_names,
    weight_shapes,
)
from slime.config.datasets import DataSpec
from slime.config.flags.rollout import ASYNC_ROLLOUT, PLAIN_ROLLOUT
from slime.config.installed import is_installed
from slime.config.lora import check_lora_files
from slime.core.errors import ConfigError
from slime.data.prompt_data import check_prompts
from slime.ray.checkpointing import Checkpointer
from slime.rollout.data_source import data_format_of
from slime.rollout.evaluation import dataset_args, eval_format
from slime.rollout.hooks import check_hooks
from slime.runlog.earlier_runs import name_owner
from slime.runlog.run_folder import check_run_folder


def check_inputs(args: Args) -> None:
    check_hooks(args)
    _check_model(args)
    for model in args.engine_models:
        check_weights(model.model_path, f"{args.sglang_config}: {model.name}")
    _check_data(args)


def check_what_is_here(args: Args) -> None:
    """Check as a start does, for a run that may be meant for another machine, and write nothing.

    That is all of a start's checks but those of files that do not exist here.
    """
    check_hooks(args)
    if any(Path(args.hf_checkpoint).glob("*.safetensors*")):
        _check_model(args)
    _check_data(args, only_existing=True)
    here = args.load is None or Path(args.load).exists()
    loaded = Checkpointer(args).loaded if here else None
    check_run_folder(args, loaded=loaded)
    _check_folders(args, only_existing=True)


def check_outputs(args: Args) -> None:
    """Check the folders of checkpoints, the first of which may be hours away."""
    _check_folders(args)
    name_owner(args)


def _check_model(args: Args) -> None:
    """Check the files of --hf-checkpoint, and the names of its tensors, without loading any."""
    check_weights(args.hf_checkpoint)
    if args.only_train_params_name_list is not None or args.freeze_params_name_list:
        check_freezing(args, weight_names(args.hf_checkpoint))
    if args.lora_rank:
        check_lora_files(args, weight_shapes(args.hf_checkpoint))
    if not args.debug_train_only:
        check_tokenizer(args.hf_checkpoint)
    if args.apply_chat_template:
        check_chat_template(args.hf_checkpoint)


def _check_folders(args: Args, *, only_existing: bool = False) -> None:
    """Check that the folders of checkpoints and exports can be written to."""
    if args.debug_rollout_only:
        return
    folders = [("--save", args.save), ("--critic-save", args.critic_save)]
    export = Path(args.save_hf.format(rollout_id=0)) if args.save_hf else None
    if export is not None:
        folders.append(("--save-hf", str(export if export.is_file() else export.parent)))
    for flag, folder in folders:
        if folder and not (only_existing and not Path(folder).exists()):
            check_writable(folder, flag)
    if export is not None and export.is_mount():
        raise ConfigError(
            f"--save-hf {export} is a mount point, which an export cannot replace: name a folder "
            f"inside it, such as {export / 'hf'}"
        )


def _check_data(args: Args, *, only_existing: bool = False) -> None:
    """Raise on an unusable row; a user's data source reads its own data."""

    def skipped(text: str) -> bool:
        spec = DataSpec.parse(text)
        absent = spec.task is None and not Path(spec.path).expanduser().exists()
        lacks_package = spec.task is not None and not is_installed("reasoning_gym")
        return only_existing and (absent or lacks_package)

    builtin = args.data_source_path.startswith("slime.rollout.data_source.")
    takes_messages = _takes_messages(args, args.rollout_function_path)
    for text in args.prompt_data if builtin and args.prompt_data else ():
        if skipped(text):
            continue
        check_prompts(text, data_format_of(args), takes_messages=takes_messages)
    for dataset in args.eval_datasets:
        if skipped(dataset.path):
            continue
        takes_messages = _takes_messages(dataset_args(args, dataset), args.eval_function_path)
        check_prompts(dataset.path, eval_format(args, dataset), takes_messages=takes_messages)


def _takes_messages(args: Args, rollout_function: str) -> bool:
    """Return whether the chat template, or the user's code, turns a list of messages into tokens."""
    plain = (
        rollout_function in (PLAIN_ROLLOUT, ASYNC_ROLLOUT)
        and args.custom_generate_function_path is None
    )
    return args.apply_chat_template or args.debug_train_only or not plain
