"""One tokenizer per checkpoint and process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@lru_cache(maxsize=8)
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hf-checkpoint {path}: no tokenizer could be loaded from it: {error}"
        ) from error


def refuse_other_vocabulary(path: str, other: str, flag: str) -> None:
    """Two models that talk in token ids must mean the same by them; a folder without a tokenizer may."""
    if not (Path(other) / "tokenizer_config.json").exists():
        return
    ours, theirs = load_tokenizer(path).get_vocab(), load_tokenizer(other).get_vocab()
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    if differing:
        raise ConfigError(
            f"{flag} {other} has another vocabulary than --hf-checkpoint: {differing[0]!r} is token "
            f"{theirs.get(differing[0])} there and {ours.get(differing[0])} here"
        )


def eos_token_id(path: str) -> int:
    token = load_tokenizer(path).eos_token_id
    if not isinstance(token, int):
        raise ConfigError(f"--hf-checkpoint {path}: its tokenizer has no end-of-text token")
    return token
