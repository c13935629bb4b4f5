"""Ids of the Hugging Face Hub: models and datasets in the local cache, or downloaded before anything starts.

    --hf-checkpoint Qwen/Qwen3-0.6B      the snapshot's folder in the cache
    --prompt-data openai/gsm8k           its train files; hf://datasets/openai/gsm8k/PATH names one file

What is in the cache is used as it is, so that a resumed run has the same revision. Only data is downloaded:
no Python files and no pickles. An existing local path always wins.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from slime.config.datasets import DataSpec
from slime.config.flags.draft import Draft
from slime.core.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_URL = "hf://datasets/"
_DATA = (".parquet", ".jsonl")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_SPLITS = {"--prompt-data": ("train",), "--eval-prompt-data": ("test", "validation", "train")}
_MAIN = ("main", "default", "data")  # configurations that are meant if none is named
_NAMED = 4  # files that a message lists


def resolve_hub_ids(draft: Draft) -> None:
    """Replace ids of the Hub by local paths."""
    model = draft["hf_checkpoint"]
    if model and _ID.fullmatch(model) and not Path(model).exists():
        draft.values["hf_checkpoint"] = str(_model(model, draft) or model)
    for name, option in (
        ("prompt_data", "--prompt-data"),
        ("eval_prompt_data", "--eval-prompt-data"),
    ):
        values = draft[name]
        if values and any(map(_is_dataset, values)):
            draft.values[name] = [one for value in values for one in _dataset(value, option, draft)]


def _model(name: str, draft: Draft) -> Path | None:
    def complete(folder: Path) -> bool:
        return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))

    folder = _snapshot(name, "model", _MODEL_FILES, draft, "--hf-checkpoint")
    if folder is not None and not complete(folder):
        raise ConfigError(
            f"--hf-checkpoint: the model {name} has no config.json with *.safetensors in {folder}: "
            f"run `hf download {name}`, or choose a model with such weights"
        )
    return folder


def _is_dataset(value: str) -> bool:
    if value.startswith(_URL):
        return True
    path = value.split("@[")[0].split(":weight=")[0]
    return bool(_ID.fullmatch(path)) and not path.endswith(_DATA) and not Path(path).exists()


def _dataset(value: str, option: str, draft: Draft) -> list[str]:
    """Return the specs of a dataset's files, each with the rows and weight that `value` asks for."""
    if not _is_dataset(value):
        return [value]
    path = DataSpec.parse(value, option).path
    owner, name, *inside = [*path.removeprefix(_URL).split("/", 2), ""][:3]
    inside = [part for part in inside if part]
    if not _ID.fullmatch(f"{owner}/{name}") or any(".." in part.split("/") for part in inside):
        raise ConfigError(f"{option}: {path} is not of the form {_URL}OWNER/NAME/FILE")
    wanted = inside or [f"*{suffix}" for suffix in _DATA]
    folder = _snapshot(f"{owner}/{name}", "dataset", wanted, draft, option)
    if folder is None:
        return [value]
    if inside:
        files = [folder / inside[0]]
        if not files[0].is_file() or not inside[0].endswith(_DATA):
            raise ConfigError(f"{option}: {path} is not a parquet or jsonl file of the dataset")
    else:
        files = _of_split(folder, f"{owner}/{name}", option)
    rest = value[len(path) :]
    if len(files) > 1 and (rest or option != "--prompt-data"):
        raise ConfigError(
            f"{option} {value}: it has {len(files)} files: {_choices(files, folder, path)}"
        )
    return [f"{file}{rest}" for file in files]


def _of_split(folder: Path, name: str, option: str) -> list[Path]:
    """Return the files of the split that the option reads, all in one folder of the dataset."""
    files = sorted(file for suffix in _DATA for file in folder.rglob(f"*{suffix}"))
    for split in _SPLITS[option]:
        found = [file for file in files if split in file.name or file.parent.name == split]
        folders = {file.parent for file in found}
        if len(folders) > 1:
            found = [file for file in found if file.parent.name in _MAIN]
        if len({file.parent for file in found}) == 1:
            return found
        if folders:
            break
    if len(files) == 1:
        return files
    raise ConfigError(
        f"{option} {name}: it is not clear which file: {_choices(files, folder, name)}"
    )


def _choices(files: list[Path], folder: Path, name: str) -> str:
    if not files:
        return "there is no parquet or jsonl file. Convert the dataset first"
    owner_and_name = "/".join(name.removeprefix(_URL).split("/")[:2])
    names = [f"{_URL}{owner_and_name}/{file.relative_to(folder)}" for file in files[:_NAMED]]
    return f"name one, such as {', '.join(names)}"


def _snapshot(name: str, kind: str, patterns: list[str], draft: Draft, option: str) -> Path | None:
    """Return the folder of a repository in the cache; download it first if it is missing there."""
    hub = importlib.import_module("huggingface_hub")
    asked = {"repo_id": name, "repo_type": kind, "allow_patterns": patterns}
    try:
        return Path(hub.snapshot_download(**asked, local_files_only=True))
    except Exception:  # it is not in the cache, or not completely
        if draft.offline:
            return None
    reason = "HF_HUB_OFFLINE is set"
    if not hub.constants.HF_HUB_OFFLINE:
        try:
            print(f"{option}: downloading {name} from the Hugging Face Hub", flush=True)
            return Path(hub.snapshot_download(**asked))
        except Exception as error:  # whatever the network, the Hub or its client has to say
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    flag = "" if kind == "model" else " --repo-type dataset"
    raise ConfigError(
        f"{option}: {name} does not exist here, and cannot be downloaded from the Hugging Face Hub "
        f"({reason}): where there is a network, run `hf download {name}{flag}`"
    )
