"""The options of tools/convert_torch_dist_to_hf.py."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NoReturn

from transformers import PretrainedConfig

from slime.config.checks.model_types import family_of
from slime.core.errors import ConfigError
from slime.weights.hf_folder import FILE_BYTES

_DESCRIPTION = (
    "Convert torch_dist to Hugging Face tensor by tensor; copy untrained ones from the original."
)


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="convert_torch_dist_to_hf.py", description=_DESCRIPTION)
    parser.add_argument("--input-dir", required=True, help="iter_... folder, or its parent folder")
    parser.add_argument("--output-dir", required=True, help="where the Hugging Face folder goes")
    parser.add_argument(
        "--origin-hf-dir", required=True, help="config, tokenizer, untrained tensors"
    )
    parser.add_argument(
        "--max-workers", type=int, default=1, help="files converted at a time, by as many processes"
    )
    parser.add_argument(
        "--chunk-size",
        type=int,
        default=FILE_BYTES,
        help="bytes per file; each worker holds one in memory",
    )
    parser.add_argument(
        "--add-missing-from-origin-hf",
        action="store_true",
        help="copy tensors that the checkpoint lacks from --origin-hf-dir",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="remove what is at --output-dir; without it, a folder not written by slime is renamed to .previous",
    )
    parser.add_argument("--vocab-size", type=int, help="must equal vocab_size of config.json")
    parser.add_argument("--model-name", help="must name the model type of config.json")
    options = parser.parse_args(argv)
    _check_folders(options)
    if min(options.max_workers, options.chunk_size) < 1:
        raise ConfigError("--max-workers and --chunk-size must be at least 1")
    return options


def _check_folders(options: argparse.Namespace) -> None:
    if not (Path(options.origin_hf_dir) / "config.json").is_file():
        raise ConfigError(f"--origin-hf-dir: {options.origin_hf_dir}/config.json does not exist")
    output = Path(options.output_dir).resolve()
    for option, folder in (
        ("--origin-hf-dir", options.origin_hf_dir),
        ("--input-dir", options.input_dir),
    ):
        if Path(folder).resolve().is_relative_to(output):
            raise ConfigError(f"--output-dir is {option}, or holds it: choose another folder")


def check_model(options: argparse.Namespace, config: PretrainedConfig) -> None:
    """Raise ConfigError if --vocab-size or --model-name disagrees with the original."""
    if options.vocab_size not in (None, config.vocab_size):
        raise ConfigError(
            f"--vocab-size {options.vocab_size}: {options.origin_hf_dir}/config.json says "
            f"{config.vocab_size}, which the output will have: remove the flag, or correct that file"
        )
    kind = str(config.model_type)
    names = [kind, family_of(kind), *(config.architectures or [])]
    if options.model_name and not any(_same_name(options.model_name, name) for name in names):
        raise ConfigError(
            f"--model-name {options.model_name}: {options.origin_hf_dir}/config.json has model_type "
            f"{config.model_type}, which decides the tensor names: remove the flag, or give the "
            "folder of that model with --origin-hf-dir"
        )


def _same_name(typed: str, name: str) -> bool:
    """Return whether `qwen3-moe` means `Qwen3MoeForCausalLM`."""
    plain, other = (re.sub("[^a-z0-9]", "", one.lower()) for one in (typed, name))
    return plain.removesuffix("forcausallm") == other.removesuffix("forcausallm")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
