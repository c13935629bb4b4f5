"""Files and packages that a run needs: a complete model, prompt files, writable folders, packages.

In a dry run, which may describe another machine, what is missing is only a warning.
"""

from __future__ import annotations

import json
import re
import tempfile
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
    for model in draft["engine_models"]:
        draft.need_file(
            model.model_path, f"{draft['sglang_config'] or '--hf-checkpoint'}: {model.name}"
        )
    if draft["ref_load"] is not None:
        draft.need_file(draft["ref_load"], "--ref-load")
    if draft["ci_load_grad_norm"]:
        draft.need_file(draft["ci_load_grad_norm"], "--ci-load-grad-norm")
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
    found = foreign_quantization(read_quantization(draft))
    if found and not draft["debug_rollout_only"]:
        raise ConfigError(
            f"--hf-checkpoint {folder} holds {found}, which slime does not train: give the model's bf16 "
            "weights; tools/convert_hf_to_fp8.py converts them to FP8"
        )


def _check_prompts(draft: Draft) -> None:
    specs = draft["prompt_data"] or []
    flags = own_flags()
    built_in = draft["data_source_path"] == flags["data_source_path"].default and draft[
        "rollout_function_path"
    ] in (flags["rollout_function_path"].default, SFT_ROLLOUT)
    needed = draft["num_rollout"] and not draft["load_debug_rollout_data"]
    if not specs and built_in and needed:
        raise ConfigError("--prompt-data is missing: give a jsonl or parquet file with prompts")
    for spec in specs if draft.origins.get("prompt_data") != "derived" else ():  # by a plan
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
    """Return text_config of config.json, or all of it without one; empty if there is no file."""
    config = read_config_json(draft)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def num_experts(config: dict[str, Any]) -> int | None:
    """Return how many experts a layer of the model in config.json has; None without experts."""
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    found = (config.get(name) for name in names)
    return next((count for count in found if count and isinstance(count, int)), None)


def is_dense(config: dict[str, Any]) -> bool:
    """Return whether config.json describes a model, and one without experts."""
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    return layers is not None and num_experts(config) is None


def read_quantization(draft: Draft) -> dict[str, Any]:
    """Return quantization_config of config.json, from the top level or from text_config."""
    for config in (read_config_json(draft), read_hf_config(draft)):
        if isinstance(config.get("quantization_config"), dict):
            return config["quantization_config"]
    return {}


def foreign_quantization(declared: dict[str, Any]) -> str | None:
    """Describe weights that are neither FP8 nor MXFP4: "INT4 weights (...)"; None for other weights."""
    method, bits = declared.get("quant_method"), declared.get("bits")
    if method in (None, "fp8", "mxfp4"):
        return None
    if method == "compressed-tensors":
        groups = (declared.get("config_groups") or {}).values()
        weights = [group.get("weights") or {} for group in groups]
        kinds = {(w.get("type", "int"), w.get("num_bits")) for w in weights}
        if kinds <= {("float", 8)} and "pack" not in str(declared.get("format")):
            return None
        method = f"{method}, {declared.get('format', 'no format')}"
        bits = next((w["num_bits"] for w in weights if w.get("num_bits")), None)
    bits = 4 if declared.get("load_in_4bit") else bits
    return f"{f'INT{bits}' if bits else 'quantized'} weights ({method})"


def read_config_json(draft: Draft) -> dict[str, Any]:
    """Return config.json as plain JSON; empty if there is no file."""
    folder = draft["hf_checkpoint"]
    path = Path(folder) / "config.json" if folder else None
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--hf-checkpoint: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-checkpoint: {path} does not hold a model's settings")
    return config


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


_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_LFS = b"version https://git-lfs"


def check_tokenizer(folder: str) -> None:
    if not any((Path(folder) / name).exists() for name in _TOKENIZERS):
        raise ConfigError(
            f"--hf-checkpoint: {folder} holds no tokenizer ({', '.join(_TOKENIZERS)}): copy the files "
            "of the model's tokenizer into it"
        )


def check_chat_template(folder: str) -> None:
    """Check for a chat template in the files, because loading the tokenizer takes seconds."""
    if any(Path(folder).glob("*chat_template*")):
        return
    config = Path(folder) / "tokenizer_config.json"
    if not config.exists() or '"chat_template"' not in config.read_text():
        raise ConfigError(
            f"--apply-chat-template: the tokenizer in {folder} has no chat template; remove the flag, or "
            "add a chat_template to its tokenizer_config.json"
        )


def check_weights(folder: str, flag: str = "--hf-checkpoint") -> None:
    """Check that every safetensors file exists and has the size in its header; skip other formats."""
    for file in weight_files(Path(folder), flag):
        problem = _problem(file)
        if problem:
            raise ConfigError(
                f"{flag}: {file} {problem}: download or copy it again "
                "(hf download MODEL --local-dir FOLDER resumes)"
            )


def weight_names(folder: str, flag: str = "--hf-checkpoint") -> list[str]:
    """Return the names of all tensors in the safetensors files of a folder."""
    index = Path(folder) / _INDEX
    if index.exists():
        weight_files(Path(folder), flag)  # raises for an index that cannot be read
        return list(json.loads(index.read_text())["weight_map"])
    return list(weight_shapes(folder, flag))


def weight_shapes(folder: str, flag: str = "--hf-checkpoint") -> dict[str, list[int]]:
    """Return the shapes of all tensors in the safetensors files of a folder."""
    shapes = {}
    for file in weight_files(Path(folder), flag):
        shapes |= file_shapes(file, flag)
    return shapes


def file_shapes(file: Path, flag: str) -> dict[str, list[int]]:
    """Return the shapes of the tensors of one safetensors file, from its header."""
    problem = _problem(file)
    if problem is not None:
        raise ConfigError(f"{flag}: {file} {problem}")
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def check_writable(folder: str | Path, flag: str) -> None:
    """Create the folder and a file in it, so that a failure shows now and not at the first save."""
    if Path(folder).is_file():
        raise ConfigError(f"{flag} {folder} is a file; name a folder")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {folder} cannot be written to: {error.strerror}: fix its permissions, or name "
            "another folder"
        ) from None


def weight_files(folder: Path, flag: str) -> list[Path]:
    """Return the safetensors files of a model: those in its index, or all of them without an index."""
    index = folder / _INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{flag}: {index} is not a weight index: {error!r}: download or copy it again"
        ) from None
    for name in names:
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            raise ConfigError(f"{flag}: {index} names {name!r}, which is not a file of its folder")
    return [folder / name for name in names]


def _problem(file: Path) -> str | None:
    """Return what is wrong with a file of 8 bytes header length, JSON header and tensor data."""
    if not file.exists():
        return f"does not exist although {_INDEX} lists it"
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(_LFS))
        if start == _LFS:
            return "is a Git LFS pointer and not the weights"
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > size - 8:
            return f"is not a safetensors file, or truncated at {size} bytes"
        stream.seek(8)
        try:
            header = json.loads(stream.read(length))
            ends = [
                entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
            ]
            expected = 8 + length + max(ends, default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return "is not a safetensors file: its header cannot be read"
    return None if size == expected else f"has {size} bytes, but its header says {expected}"
