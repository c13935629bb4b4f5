"""One tokenizer per checkpoint and process."""

from __future__ import annotations

from functools import lru_cache
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


def eos_token_id(path: str) -> int:
    token = load_tokenizer(path).eos_token_id
    if not isinstance(token, int):
        raise ConfigError(f"--hf-checkpoint {path}: its tokenizer has no end-of-text token")
    return token
