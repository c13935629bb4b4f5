"""Ids of the Hugging Face Hub: models and datasets in the local cache, or downloaded before anything starts.

    --hf-checkpoint Qwen/Qwen3-0.6B      the snapshot's folder in the cache
    --prompt-data openai/gsm8k           its train files; hf://datasets/openai/gsm8k/PATH names one file

A repository in the cache keeps its revision, so that a resumed run reads the same data; what the cache lacks of
that revision is downloaded. Only data is downloaded: no Python files and no pickles. An existing local path always
wins.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from slime.config.datasets import DataSpec
from slime.config.flags.draft import Draft
from slime.config.flags.spec import option_of
from slime.core.errors import ConfigError

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_URL = "hf://datasets/"
_DATA = (".parquet", ".jsonl")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_OTHER_FORMATS = ["original/*", "consolidated*"]  # the same weights again
_SPLITS = {"--prompt-data": ("train",), "--eval-prompt-data": ("test", "validation", "train")}
_MAIN = ("main", "default", "data")  # configurations to use if none is named
_NAMED = 4  # files that a message lists
_SHARD = re.compile(r"(.+)-([0-9]{1,6})-of-([0-9]{1,6})(.*)")  # train-00000-of-00005.parquet
_HELD_OUT = re.compile(r"(?<![a-z])(tests?|validation|valid|val|dev|eval)(?![a-z])")


def resolve_hub_ids(draft: Draft) -> None:
    """Replace ids of the Hub by local paths."""
    model = draft["hf_checkpoint"]
    if model and _ID.fullmatch(model) and not Path(model).exists():
        draft.values["hf_checkpoint"] = str(_model(model, draft) or model)
    for name in ("prompt_data", "eval_prompt_data"):
        values, option = draft[name], option_of(name)
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
    """Return the specs of a dataset's files, each with the rows and weight of `value`."""
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
        files = _of_split(folder, f"{owner}/{name}", option, draft)
    rest = value[len(path) :]
    if len(files) > 1 and (rest or option != "--prompt-data"):
        raise ConfigError(
            f"{option} {value}: it has {len(files)} files: {_choices(files, folder, path)}"
        )
    return [f"{file}{rest}" for file in files]


def _of_split(folder: Path, name: str, option: str, draft: Draft) -> list[Path]:
    """Return the files of the split that the option reads, all in one folder of the dataset."""
    download = f"run `hf download {name} --repo-type dataset` on a machine with network access"
    files = sorted(file for suffix in _DATA for file in folder.rglob(f"*{suffix}"))
    for split in _SPLITS[option]:
        found = [file for file in files if split in file.name or file.parent.name == split]
        folders = {file.parent for file in found}
        if len(folders) > 1:
            found = [file for file in found if file.parent.name in _MAIN]
        if len({file.parent for file in found}) == 1:
            if missing := _missing_shards(found):
                place = found[0].parent.relative_to(folder)
                draft.lacking(
                    f"{option} {name}: the cache lacks {len(missing)} of the files of {place} "
                    f"({_listed(missing)}): "
                    f"{download}"
                )
            return found
        if folders:
            break
    if len(files) == 1:
        only = files[0].relative_to(folder)
        if option == "--prompt-data" and _HELD_OUT.search(str(only).lower()):
            draft.lacking(
                f"{option} {name}: there is no train file, only {only}: if the cache is incomplete, "
                f"{download}; to train on this file, give {option} {_URL}{name}/{only}"
            )
        return files
    raise ConfigError(f"{option} {name}: several files match: {_choices(files, folder, name)}")


def _missing_shards(files: list[Path]) -> list[str]:
    """Return the names of absent files of sets such as train-00000-of-00005, numbered from 0 or from 1."""
    sets: dict[tuple[str, str], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.stem):
            sets.setdefault((match[1], match[3]), set()).add(int(match[2]))
    missing = []
    for (stem, total), present in sets.items():
        first = int(int(total) in present)
        absent = sorted(set(range(first, first + int(total))) - present)
        missing += [f"{stem}-{number:0{len(total)}}-of-{total}" for number in absent]
    return missing


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)


def _choices(files: list[Path], folder: Path, name: str) -> str:
    if not files:
        return "there is no parquet or jsonl file. Convert the dataset first"
    owner_and_name = "/".join(name.removeprefix(_URL).split("/")[:2])
    names = [f"{_URL}{owner_and_name}/{file.relative_to(folder)}" for file in files[:_NAMED]]
    return f"name one, such as {', '.join(names)}"


def _snapshot(name: str, kind: str, patterns: list[str], draft: Draft, option: str) -> Path | None:
    """Return the folder of a repository in the cache; download first what is missing there."""
    hub = importlib.import_module("huggingface_hub")
    constants = importlib.import_module("huggingface_hub.constants")
    head = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "refs", "main")
    revision = head.read_text().strip() if head.is_file() else None  # the commit in the cache
    place = {"repo_id": name, "repo_type": kind, "revision": revision}
    ignored = _OTHER_FORMATS if kind == "model" else []
    request = {**place, "allow_patterns": patterns, "ignore_patterns": ignored}
    what = ""
    try:
        found = Path(hub.snapshot_download(**request, local_files_only=True))
    except Exception as error:  # it is not in the cache, or is known to be incomplete
        found, lacks = None, re.search(r"incomplete: (.* missing \(.*?\))\.", str(error))
        what = f"is incomplete here ({lacks[1]})" if lacks else "does not exist here"
    reason = "HF_HUB_OFFLINE is set"
    if not draft.offline and not constants.HF_HUB_OFFLINE:
        try:
            wanted = name
            if found is not None:  # also a first request with a timeout, which a download has not
                info = hub.HfApi().repo_info(**place, timeout=constants.DEFAULT_ETAG_TIMEOUT)
                files = hub.utils.filter_repo_objects(
                    [file.rfilename for file in info.siblings or []],
                    allow_patterns=patterns,
                    ignore_patterns=ignored,
                )
                missing = [file for file in files if not (found / file).exists()]
                if not missing:
                    return found
                wanted = f"{_listed(missing)} of {name}"
            print(f"{option}: downloading {wanted} from the Hugging Face Hub", flush=True)
            return Path(hub.snapshot_download(**request))
        except Exception as error:  # of the network, the Hub or its client
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if found is not None or draft.offline:
        return found
    flag = "" if kind == "model" else " --repo-type dataset"
    raise ConfigError(
        f"{option}: {name} {what}, and cannot be downloaded from the Hugging Face Hub "
        f"({reason}): on a machine with network access, run `hf download {name}{flag}`"
    )
