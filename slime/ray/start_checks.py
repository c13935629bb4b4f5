"""Checks before any process of a run starts: hooks, model, data, and the folders to write to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.backends.param_names import check_freezing
from slime.config.arguments import Args
from slime.config.checks.file_checks import (
    check_chat_template,
    check_tokenizer,
    check_weights,
    check_writable,
    file_shapes,
    weight_files,
    weight_names,
)
from slime.config.checks.model_types import has_tower, in_tower, trains_tower
from slime.config.datasets import DataSpec
from slime.config.flags.rollout import ASYNC_ROLLOUT, PLAIN_ROLLOUT, SFT_ROLLOUT
from slime.config.flags.spec import option_of
from slime.config.installed import is_installed
from slime.config.lora import check_lora_files
from slime.config.peft_files import decoder_shapes
from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.data.prompt_data import check_prompts, load_prompts
from slime.data.tokenizer import load_tokenizer
from slime.ray.checkpointing import Checkpointer
from slime.rollout.data_source import data_format_of
from slime.rollout.evaluation import dataset_args, eval_format
from slime.rollout.hooks import HOOKS, check_hooks
from slime.rollout.rm_hub import batched_async_rm, group_rm
from slime.runlog.earlier_runs import name_owner
from slime.runlog.run_folder import check_run_folder
from slime.utils.http import run

if TYPE_CHECKING:
    import torch


def check_inputs(args: Args) -> None:
    check_hooks(args)
    _check_model(args)
    for model in args.engine_models:
        check_weights(model.model_path, f"{args.sglang_config}: {model.name}")
    _check_data(args)


def check_for_dry_run(args: Args) -> list[str]:
    """Make the checks of a start for --dry-run: write nothing, and skip files that do not exist here.

    The run may be meant for another machine, which has them. Return what was checked, and what was
    not, one line each.
    """
    check_hooks(args)
    hooks = [option_of(name) for name in HOOKS if args.origin(name) in ("command line", "config")]
    lines = [f"hooks      {', '.join(hooks)}"] if hooks else []
    if any(Path(args.hf_checkpoint).glob("*.safetensors*")):
        _check_model(args)
        lines.append(f"files      of --hf-checkpoint {args.hf_checkpoint}")
    else:
        lines.append(f"files      not checked: no safetensors in {args.hf_checkpoint} here")
    lines += [f"data       {line}" for line in _check_data(args, only_existing=True)]
    here = args.load is None or Path(args.load).exists()
    loaded = Checkpointer(args).loaded if here else None
    check_run_folder(args, loaded=loaded)
    _check_folders(args, only_existing=True)
    folders = [
        f"{option_of(n)} {getattr(args, n)}"
        for n in ("run_dir", "save", "save_hf")
        if getattr(args, n)
    ]
    lines.append(f"folders    {', '.join(folders)}")
    return [*lines, *_try_reward(args)]


def _try_reward(args: Args) -> list[str]:
    """Return the user's reward for the first row, with its label as the response.

    An exception is reported and does not refuse the run: it may call a service that only the run can reach.
    """
    flag = f"--custom-rm-path {args.custom_rm_path}"
    given = args.origin("custom_rm_path") in ("command line", "config")
    data = (args.prompt_data or [""])[0]
    file = DataSpec.parse(data).path if data else ""
    if not given or not Path(file).expanduser().is_file():
        return []
    if not any(Path(args.hf_checkpoint).glob("tokenizer*")):
        return []
    tokenizer = load_tokenizer(args.hf_checkpoint)
    sample = load_prompts(data, data_format_of(args), tokenizer).make_sample(0)
    sample.response = "" if sample.label is None else str(sample.label)
    sample.tokens = sample.tokens or [0]
    sample.append_response_tokens(tokens=[0], log_probs=[0.0])
    try:
        (sample.reward,) = run(
            group_rm(args, [sample]) if args.group_rm else batched_async_rm(args, [sample])
        )
    except Exception as error:
        return [f"reward     {flag} raised on the first row: {type(error).__name__}: {error}"]
    if args.reward_key is not None and not isinstance(sample.reward, dict):
        key = f"--reward-key {args.reward_key}"
        raise ConfigError(f"{flag}: the reward is a number, not a dictionary: remove {key}")
    try:
        value = sample.get_reward_value(args)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{flag}: {error.args[0]}") from None
    return [f"reward     {flag} gives {value:g} for the first row, with its label as the response"]


def refuse_other_tower(args: Args) -> None:
    """Raise ConfigError if --ref-load is a Hugging Face folder with another frozen tower than --hf-checkpoint.

    Megatron's trainer and the engines take a frozen tower from --hf-checkpoint.
    """
    source = str(args.ref_load)
    if trains_tower(args) or not (Path(source) / "config.json").is_file():
        return
    if Path(source).resolve() == Path(args.hf_checkpoint).resolve():
        return
    held, given = _tower(args.hf_checkpoint), _tower(source, "--ref-load")
    if any(not held[n]().to(read().dtype).equal(read()) for n, read in given.items() if n in held):
        raise ConfigError(
            f"--ref-load {source} has another vision tower than --hf-checkpoint, which is the one that a run with a "
            "frozen tower uses: give the folder as --hf-checkpoint too"
        )


def _tower(folder: str, flag: str = "--hf-checkpoint") -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions that read the tensors of a folder's vision tower, by name."""
    return {
        name: partial(_read, file, name)
        for file in weight_files(Path(folder), flag)
        for name in file_shapes(file, flag)
        if in_tower(name)
    }


def _read(file: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open  # the driver imports torch only if it needs it

    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)


def check_outputs(args: Args) -> None:
    """Check the folders of checkpoints now: the first save may be hours away."""
    _check_folders(args)
    name_owner(args)


def _check_model(args: Args) -> None:
    """Check the files of --hf-checkpoint, and the names of its tensors, without loading any."""
    check_weights(args.hf_checkpoint)
    if args.only_train_params_name_list is not None or args.freeze_params_name_list:
        check_freezing(args, weight_names(args.hf_checkpoint))
    if args.lora_rank:
        check_lora_files(args, decoder_shapes(args.hf_checkpoint))
    if args.train_backend == "megatron" and args.ref_load and has_tower(args):
        refuse_other_tower(args)
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


def _check_data(args: Args, *, only_existing: bool = False) -> list[str]:
    """Raise on an unusable row; a user's data source reads its own data. Return what was read."""
    builtin = args.data_source_path.startswith("slime.rollout.data_source.")
    trained = args.prompt_data if builtin and args.prompt_data else ()
    refuse = _refusal(args, args.rollout_function_path, args.input_key)
    read = [(text, data_format_of(args), refuse) for text in trained]
    for dataset in args.eval_datasets:
        data_format = eval_format(args, dataset)
        evaluated = dataset_args(args, dataset)
        refuse = _refusal(evaluated, args.eval_function_path, data_format.input_key)
        read.append((dataset.path, data_format, refuse))
    lines, total = [], 0
    for number, (text, data_format, refuse) in enumerate(read):
        if only_existing and _is_elsewhere(text):
            lines.append(f"not checked: {text} does not exist here")
            continue
        count = check_prompts(text, data_format, refuse)
        total += count if number < len(trained) else 0
        lines.append(f"{count:,} row{'' if count == 1 else 's'} of {text}")
    if 0 < total < args.rollout_batch_size:
        lines.append(f"--rollout-batch-size {args.rollout_batch_size}: prompts repeat in a rollout")
    return lines


def _is_elsewhere(text: str) -> bool:
    """Return whether a dataset, or the package that makes it, is missing on this machine."""
    spec = DataSpec.parse(text)
    if spec.task is not None:
        return not is_installed("reasoning_gym")
    return not Path(spec.path).expanduser().exists()


def _refusal(args: Args, rollout_function: str, key: str) -> Callable[[Sample], str | None]:
    """Return a function that says why generation, or supervised training, cannot use a row."""

    def supervised(sample: Sample) -> str | None:
        if isinstance(sample.prompt, list) and not args.apply_chat_template:
            roles = [m.get("role") for m in sample.prompt if isinstance(m, dict)]
            return None if "assistant" in roles else f"{key!r} has no assistant message to train on"
        if isinstance(sample.label, str):
            return None
        return (
            "a row for SFT needs the response as text: set --label-key to its key, or --input-key to a list of "
            "messages without --apply-chat-template"
        )

    def rendered(sample: Sample) -> str | None:
        if isinstance(sample.prompt, str):
            return None
        return f"{key!r} is a list of messages, which must be rendered: add --apply-chat-template"

    if rollout_function == SFT_ROLLOUT:
        return supervised
    plain = rollout_function in (PLAIN_ROLLOUT, ASYNC_ROLLOUT)
    own = args.custom_generate_function_path is not None
    takes_messages = args.apply_chat_template or args.debug_train_only or own or not plain
    return (lambda sample: None) if takes_messages else rendered
