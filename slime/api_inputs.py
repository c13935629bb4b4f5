"""What `slime.train` writes into RUN_DIR/inputs: rows, functions, and a --config file with every option."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from slime.config.flags.registry import redact
from slime.config.flags.spec import option_of
from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.runlog.earlier_runs import INPUTS
from slime.runlog.run_yaml import dump_run_yaml

Dataset = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
# Columns that are labels without label_key.
_LABELS = ("label", "answer", "solution", "ground_truth")
# Flags that a parameter of `train` sets.
_FLAGS_OF_PARAMETER = {
    "model": ("hf_checkpoint",),
    "dataset": ("prompt_data",),
    "eval_dataset": ("eval_prompt_data", "eval_config"),
    "reward": ("custom_rm_path", "rm_type", "group_rm", "reward_key"),
    "generate": ("custom_generate_function_path",),
}
_HOOKS = "slime.ray.python_functions"
_OPTIONS_FILE = "options.yaml"
_ROW = "slime_row"  # key of a whole row in the written file: no column of a dataset


def write_inputs(
    folder: Path,
    model: str | os.PathLike[str],
    dataset: Dataset,
    reward: Any,
    generate: Callable[..., Any] | None,
    eval_dataset: Dataset | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Write rows and functions into the folder; return the values of all flags to set."""
    _check_given_once(options, reward=reward, generate=generate, eval_dataset=eval_dataset)
    folder.mkdir(parents=True)
    values = {"save": "{run_dir}/checkpoints", "save_hf": "{run_dir}/hf", **options}
    values |= {"hf_checkpoint": model, **_write_functions(folder, reward, generate)}
    files = any(isinstance(data, str | os.PathLike) for data in (dataset, eval_dataset))
    if not files and options.keys().isdisjoint(_FLAGS_OF_PARAMETER["eval_dataset"]):
        values.setdefault("metadata_key", _ROW)  # the key of a file is also that of written rows
    path, keys = _write_rows(folder / "train.jsonl", dataset, values)
    values |= {"prompt_data": [path], **keys}
    if eval_dataset is not None:
        path, _ = _write_rows(folder / "eval.jsonl", eval_dataset, values)
        values["eval_prompt_data"] = ["eval", path]
    return {name: plain_value(name, value) for name, value in values.items()}


def write_config(folder: Path, values: Mapping[str, Any]) -> list[str]:
    """Write the options to a --config file; secrets are only in the returned command line."""
    secret = [name for name, value in values.items() if redact(name, value) != value]
    file = folder / INPUTS / _OPTIONS_FILE
    kept = {name: value for name, value in values.items() if name not in secret}
    file.write_text(dump_run_yaml(kept))
    options = [word for name in secret for word in (option_of(name), *_as_argv(values[name]))]
    return ["--config", str(file), "--run-dir", str(folder), *options]


def _as_argv(value: Any) -> list[str]:
    if isinstance(value, list):
        return [word for item in value for word in _as_argv(item)]
    return [orjson.dumps(value).decode() if isinstance(value, dict) else str(value)]


def plain_value(name: str, value: Any) -> Any:
    if callable(value):
        raise ConfigError(f"{name} takes an import path; pass a function as reward or generate")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [plain_value(name, item) for item in value] if isinstance(value, list | tuple) else value


def _check_given_once(options: Mapping[str, Any], **parameters: Any) -> None:
    """Refuse options whose value is decided by a parameter of `train`."""
    parameters |= {"model": True, "dataset": True}
    several = isinstance(parameters["reward"], list | tuple)
    for parameter, names in _FLAGS_OF_PARAMETER.items():
        for name in names if parameters[parameter] is not None else ():
            if options.get(name) is not None and (name != "reward_key" or several):
                raise ConfigError(f"{name} and {parameter} are mutually exclusive: remove one")


def _write_functions(
    folder: Path, reward: Any, generate: Callable[..., Any] | None
) -> dict[str, Any]:
    """Store the functions; return the flags that name the hooks which call them."""
    if reward is None and generate is None:
        return {}
    from slime.ray.python_functions import make_functions, store

    functions = make_functions(reward, generate)
    store(functions, folder)
    hooks = {"custom_rm_path": f"{_HOOKS}.reward"} if functions.rewards else {}
    if functions.reward_key:
        hooks["reward_key"] = functions.reward_key
    return hooks | ({"custom_generate_function_path": f"{_HOOKS}.generate"} if generate else {})


def _write_rows(
    file: Path, dataset: Dataset, options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Write the rows, each with all of its columns as metadata; return the path and the keys to read them by.

    A dataset that is a path stays where it is, and is read by the keys in the options.
    """
    if isinstance(dataset, str | os.PathLike):
        return os.fspath(dataset), {}
    rows = [dict(row) for row in dataset]
    if not rows:
        raise ConfigError("dataset has no rows")
    keys = _keys(rows[0], options)
    metadata = options.get("metadata_key", "metadata")
    with file.open("wb") as lines:
        for number, row in enumerate(rows):
            try:
                lines.write(orjson.dumps({metadata: row, **row}) + b"\n")
            except TypeError as error:
                raise ConfigError(f"dataset: row {number} cannot be written: {error}") from None
    messages = isinstance(rows[0][keys["input_key"]], list)
    if messages and "custom_generate_function_path" not in options:
        keys["apply_chat_template"] = options.get("apply_chat_template", True)
    return str(file), keys


def _keys(row: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of prompt and label: as the options say, or by their usual names."""
    input_key = options.get("input_key") or ("prompt" if "prompt" in row else "input")
    labels = [name for name in _LABELS if name in row]
    label_key = options.get("label_key") or (labels[0] if len(labels) == 1 else None)
    if input_key not in row:
        raise ConfigError(f"dataset: rows have no column {input_key!r}: set input_key")
    return {"input_key": input_key, "label_key": label_key}


def to_sample(row: Mapping[str, Any], keys: Mapping[str, Any]) -> Sample:
    keys = _keys(row, keys if keys["input_key"] in row else {})
    label = row.get(keys["label_key"]) if keys["label_key"] else None
    return Sample(prompt=row[keys["input_key"]], label=label, metadata=dict(row))
