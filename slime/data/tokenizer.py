"""Load tokenizers and configs, and tokenize rendered prompts and untrusted text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.checks.model_types import read_as
from slime.core.errors import ConfigError, UserError
from slime.utils.gc_tuning import collector_off

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@lru_cache(maxsize=8)
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    with collector_off():  # imports torch
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hf-checkpoint {path}: no tokenizer could be loaded from it: {error}"
        ) from error


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, rendered: bool) -> list[int]:
    """Tokenize a prompt. Special tokens are added unless a chat template has written them already."""
    return list(tokenizer.encode(text, add_special_tokens=not rendered))


def token_texts(path: str, ids: list[int]) -> list[str]:
    """Decode each token alone; an incomplete UTF-8 character is shown as in the vocabulary."""
    tokenizer = load_tokenizer(path)
    texts = [str(tokenizer.decode([number])) for number in ids]
    return [
        str(tokenizer.convert_ids_to_tokens(number)) if "\ufffd" in text else text
        for number, text in zip(ids, texts, strict=True)
    ]


def load_hf_config(path: str | Path) -> PretrainedConfig:
    """Load the config of a Hugging Face folder. Python code in the folder is never run."""
    from transformers import AutoConfig

    try:
        return load_renamed_config(path) or AutoConfig.from_pretrained(
            path, trust_remote_code=False
        )
    except ValueError as error:
        reason = str(error).splitlines()[0]
        if "custom code" in reason or "trust_remote_code" in str(error):
            reason = "its model is Python code in the folder, which slime does not run"
        raise ConfigError(f"{path}: its config.json cannot be used: {reason}") from error


def load_renamed_config(
    path: str | Path, also: Mapping[str, str] | None = None
) -> PretrainedConfig | None:
    """Return the config of a model whose type transformers has under another name; None for others.

    `also` has further types by name: {"mimo": "qwen2"}.
    `auto_map`, which names Python code in the folder, is dropped: transformers' own class is used.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    raw, _ = PretrainedConfig.get_config_dict(path)
    given = str(raw.get("model_type") or "")
    known = (also or {}).get(given, read_as(given))
    if known == given:
        return None
    fields = {key: value for key, value in raw.items() if key not in ("auto_map", "model_type")}
    return CONFIG_MAPPING[known].from_dict(fields)


def encode_rendered(path: str, text: str) -> list[int]:
    """Tokenize the output of a chat template, with its control tokens; thread-safe."""
    return _rendered_encoder(path)(text) if text else []


@lru_cache(maxsize=8)
def _rendered_encoder(path: str) -> Callable[[str], list[int]]:
    tokenizer = load_tokenizer(path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer, written in Python
        return partial(tokenizer.encode, add_special_tokens=False)
    return _encoder_of(backend, backend.to_str(), as_plain_text=False)


def _encoder_of(backend: Any, spec: str, *, as_plain_text: bool) -> Callable[[str], list[int]]:
    """Return the function that encodes by a copy of the tokenizer, read from its JSON.

    A copy, because `tokenizer.encode` changes the settings of the original; threads share the copy.
    """
    own = type(backend).from_str(spec)
    own.encode_special_tokens = as_plain_text
    own.no_truncation()
    own.no_padding()
    return lambda text: own.encode(text, add_special_tokens=False).ids


def encode_content(path: str, text: str) -> list[int]:
    """Tokenize untrusted text: what looks like a control token of the chat template stays plain text."""
    return _content_encoder(path)(text)


@lru_cache(maxsize=8)
def control_tokens(path: str, *, special_only: bool = False) -> dict[int, str]:
    """Return the control tokens of the chat template by id.

    These are the special tokens and, without `special_only`, the added tokens that occur in the
    template: some models do not mark the names of roles as special.
    """
    tokenizer = load_tokenizer(path)
    template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
    control: dict[int, str] = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        written = token.content in template and not token.content.isspace()
        if token.special or (written and not special_only):
            control[number] = token.content
    control.pop(tokenizer.unk_token_id, None)  # type: ignore[arg-type]
    return control


@lru_cache(maxsize=8)
def spelt_exactly(path: str) -> bool:
    """Return whether control tokens match text exactly, and never by normalizing it first."""
    tokenizer = load_tokenizer(path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is None:
        return True
    return not any(
        tokenizer.added_tokens_decoder[token].normalized for token in control_tokens(path)
    )


@lru_cache(maxsize=8)
def _content_encoder(path: str) -> Callable[[str], list[int]]:
    tokenizer = load_tokenizer(path)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer, written in Python
        return partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    spec = json.loads(backend.to_str())
    for token in spec["added_tokens"]:
        token["special"] |= token["id"] in control_tokens(path)
    encode_plainly = _encoder_of(backend, json.dumps(spec), as_plain_text=True)
    control = control_tokens(path)

    def encode(text: str) -> list[int]:
        tokens = encode_plainly(text)
        for token in control.keys() & tokens:
            raise UserError(
                f"the tokenizer of {path} cannot write {control[token]!r} as plain text"
            )
        return tokens

    return encode


def refuse_other_vocabulary(path: str, other: str, flag: str) -> None:
    """Raise ConfigError if two models that exchange token ids have different vocabularies."""
    if not (Path(other) / "tokenizer_config.json").exists():
        return
    ours, theirs = load_tokenizer(path).get_vocab(), load_tokenizer(other).get_vocab()
    differing = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
    if differing:
        raise ConfigError(
            f"{flag} {other} has another vocabulary than --hf-checkpoint: {differing[0]!r} has id "
            f"{theirs.get(differing[0])} there and {ours.get(differing[0])} here: choose a model with the same"
        )


def eos_token_id(path: str) -> int:
    token = load_tokenizer(path).eos_token_id
    if not isinstance(token, int):
        raise ConfigError(
            f"--hf-checkpoint {path}: its tokenizer has no end-of-text token: set eos_token in its "
            "tokenizer_config.json"
        )
    return token
