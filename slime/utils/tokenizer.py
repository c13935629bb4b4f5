"""One tokenizer per checkpoint and process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.collector import collector_off
from slime.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@lru_cache(maxsize=8)
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    with collector_off():  # brings torch in
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hf-checkpoint {path}: no tokenizer could be loaded from it: {error}"
        ) from error


def encode_content(path: str, text: str) -> list[int]:
    """Tokens of a text that somebody else wrote: what is spelt like a token of the chat template stays text."""
    return _content_encoder(path)(text)


@lru_cache(maxsize=8)
def _content_encoder(path: str) -> Callable[[str], list[int]]:
    tokenizer = load_tokenizer(path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # one written in Python
        return partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    spec = json.loads(backend.to_str())
    template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
    for token in spec["added_tokens"]:  # some models' names of roles are not called special
        token["special"] |= token["content"] in template and not token["content"].isspace()
    # A copy, as the setting is one of the tokenizer, which other threads use meanwhile.
    plain = type(backend).from_str(json.dumps(spec))
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()
    control = {t["id"]: t["content"] for t in spec["added_tokens"] if t["special"]}
    control.pop(tokenizer.unk_token_id, None)

    def encode(text: str) -> list[int]:
        tokens = plain.encode(text, add_special_tokens=False).ids
        for token in control.keys() & tokens:
            raise UserError(
                f"the tokenizer of {path} cannot write {control[token]!r} as plain text"
            )
        return tokens

    return encode


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
