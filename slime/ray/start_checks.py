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
)
from slime.config.datasets import DataSpec
from slime.config.flags.rollout import ASYNC_ROLLOUT, PLAIN_ROLLOUT
from slime.config.installed import is_installed
from slime.core.errors import ConfigError
from slime.data.prompt_data import check_prompts
from slime.rollout.data_source import data_format_of
from slime.rollout.evaluation import dataset_args, eval_format
from slime.rollout.hooks import check_hooks
from slime.runlog.earlier_runs import name_owner


def check_inputs(args: Args) -> None:
    check_hooks(args)
    check_weights(args.hf_checkpoint)
    _check_freezing(args)
    for model in args.engine_models:
        check_weights(model.model_path, f"{args.sglang_config}: {model.name}")
    if not args.debug_train_only:
        check_tokenizer(args.hf_checkpoint)
    if args.apply_chat_template:
        check_chat_template(args.hf_checkpoint)
    _check_data(args)


def check_what_is_here(args: Args) -> None:
    """Check hooks and those files that exist here, for a run that may be meant for another machine."""
    check_hooks(args)
    if any(Path(args.hf_checkpoint).glob("*.safetensors*")):
        check_weights(args.hf_checkpoint)
        _check_freezing(args)
        if args.apply_chat_template:
            check_chat_template(args.hf_checkpoint)
    _check_data(args, only_existing=True)


def _check_freezing(args: Args) -> None:
    """Check the patterns against the tensors of the checkpoint, without loading any."""
    if args.only_train_params_name_list is not None or args.freeze_params_name_list:
        check_freezing(args, weight_names(args.hf_checkpoint))


def check_outputs(args: Args) -> None:
    """Check the folders of checkpoints, the first of which may be hours away."""
    for flag, folder in (("--save", args.save), ("--critic-save", args.critic_save)):
        if folder and not args.debug_rollout_only:
            check_writable(folder, flag)
    if args.save_hf and not args.debug_rollout_only:
        folder = Path(args.save_hf.format(rollout_id=0))
        check_writable(folder if folder.is_file() else folder.parent, "--save-hf")
        if folder.is_mount():
            raise ConfigError(
                f"--save-hf {folder} is a mount point, which an export cannot replace: name a folder "
                f"inside it, such as {folder / 'hf'}"
            )
    name_owner(args)


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
