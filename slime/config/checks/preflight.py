"""Check files before a process starts: the model is complete, output folders are writable."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from slime.core.errors import ConfigError

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
    for file in _weight_files(Path(folder), flag):
        problem = _problem(file)
        if problem:
            raise ConfigError(
                f"{flag}: {file} {problem}: download or copy it again "
                "(hf download MODEL --local-dir FOLDER resumes)"
            )


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


def _weight_files(folder: Path, flag: str) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{flag}: {index} is not a weight index: {error!r}: download or copy it again"
        ) from None
    return [folder / name for name in sorted(set(names))]


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
        except (ValueError, KeyError, TypeError, AttributeError):
            return "is not a safetensors file: its header cannot be read"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"has {size} bytes where its header says {expected}"
