"""Text in and out: the tokenizer, and the search for stop strings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slime.engine.arguments import EngineArgs
from slime.engine.request import FinishReason, Request
from slime.engine.sampling_params import RequestError
from slime.utils.errors import UserError


class TextCodec:
    """The tokenizer behind a lock (HTTP and engine thread share it), or none: then ids only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids if tokenizer is not None else ())
        self._lock = threading.Lock()

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    @property
    def eos_token_id(self) -> int | None:
        return getattr(self._tokenizer, "eos_token_id", None)

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return self.require("`text`").encode(text)

    def encode_made(self, make_text: Callable[[PreTrainedTokenizerBase], str]) -> list[int]:
        """Ids of a text that the tokenizer's chat template makes, special tokens included."""
        with self._lock:
            tokenizer = self.require("a chat template")
            return tokenizer.encode(make_text(tokenizer), add_special_tokens=False)

    def decode(self, request: Request) -> str:
        """The output as text, cut at the stop string that ended it."""
        text = self._decode(request, request.output_ids)
        finish = request.finish
        if (
            finish is not None
            and isinstance(finish.matched, str)
            and not request.params.no_stop_trim
        ):
            found = text.find(finish.matched)
            text = text[:found] if found >= 0 else text
        return text

    def decode_token(self, token: int) -> str:
        with self._lock:
            text = self.require("`return_text_in_logprobs`").decode([token])
        assert isinstance(text, str)
        return text

    def find_stop(self, request: Request) -> FinishReason | None:
        """The first stop string in the end of the output, if any."""
        # A token stands for at least one byte, so a match cannot begin before this many tokens.
        window = max(len(stop.encode()) for stop in request.params.stop) + 1
        tail = self._decode(request, request.token_ids[self._tail_start(request, window) :])
        for stop in request.params.stop:
            if stop in tail:
                return FinishReason(kind="stop", matched=stop)
        return None

    def _tail_start(self, request: Request, count: int) -> int:
        """Where the last `count` tokens of the output begin, those without text not counted."""
        start = max(request.prompt_len, len(request.token_ids) - count)
        silent = self._special if request.params.skip_special_tokens else frozenset()
        if not silent or silent.isdisjoint(request.token_ids[start:]):
            return start
        start = len(request.token_ids)
        while start > request.prompt_len and count > 0:
            start -= 1
            count -= request.token_ids[start] not in silent
        return start

    def check(self, request: Request) -> None:
        if request.params.stop:
            self.require("`stop`")

    def _decode(self, request: Request, ids: list[int]) -> str:
        params = request.params
        with self._lock:
            text = self.require("text output").decode(
                ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        assert isinstance(text, str)
        return text

    def require(self, what: str) -> PreTrainedTokenizerBase:
        """The tokenizer, for what needs one."""
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this engine was started without one")
        return self._tokenizer


def load_codec(args: EngineArgs) -> TextCodec:
    if args.skip_tokenizer_init:
        return TextCodec(None)
    path = args.tokenizer_path or args.model_path
    # Without these files transformers makes an empty tokenizer of the model's kind instead of failing.
    if not any((Path(path) / name).is_file() for name in _TOKENIZER_FILES):
        raise _no_tokenizer(path, f"none of {', '.join(_TOKENIZER_FILES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise _no_tokenizer(path, str(error).splitlines()[0]) from error
    return TextCodec(tokenizer)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def _no_tokenizer(path: str, reason: str) -> UserError:
    return UserError(
        f"no tokenizer in {path} ({reason}); give its folder with --tokenizer-path, or "
        "--skip-tokenizer-init to work with token ids only"
    )
