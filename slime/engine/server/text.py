"""Thread-safe access to the tokenizer, and the search for stop strings."""

from __future__ import annotations

import copy
import threading
from functools import cached_property
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slime.core.errors import UserError
from slime.engine.arguments import EngineArgs
from slime.engine.scheduler.constraint import Constraint, Constraints
from slime.engine.scheduler.request import FinishReason, Request
from slime.engine.scheduler.sampling_params import RequestError, SamplingParams

_MAX_CONSTRAINTS = 8  # distinct ones per call: a hostile one compiles for a second


class TextCodec:
    """The tokenizer, locked because HTTP and engine threads share it; without one, token ids only.

    Encoding has its own copy and its own lock, so that a client's long text does not block the engine's
    decoding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._encoder: PreTrainedTokenizerBase | None = None  # copied when the first text arrives
        self._special = frozenset(tokenizer.all_special_ids if tokenizer is not None else ())
        self._lock, self._encoder_lock = threading.Lock(), threading.Lock()
        self._constraints: Constraints | None = None  # made when the first schema arrives

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    @property
    def eos_token_id(self) -> int | None:
        return getattr(self._tokenizer, "eos_token_id", None)

    @cached_property
    def longest_token(self) -> int:
        """Return the maximum number of characters in one token."""
        return max(map(len, self.require("`text`").get_vocab()))

    def encode(self, text: str, context_len: int, *, rendered: bool = False) -> list[int]:
        """Tokenize a prompt; refuse a text that cannot fit into the context without tokenizing it.

        A `rendered` chat template already contains special tokens.
        """
        tokenizer = self.require("`text`")
        if len(text) > context_len * self.longest_token:
            raise RequestError(
                f"The input ({len(text)} characters) is longer than the model's context length "
                f"({context_len} tokens)."
            )
        with self._encoder_lock:
            if self._encoder is None:
                with self._lock:
                    self._encoder = copy.deepcopy(tokenizer)
            return self._encoder.encode(text, add_special_tokens=not rendered)

    def constrain(
        self, params: list[SamplingParams], vocab_size: int, eos_ids: frozenset[int]
    ) -> dict[int, Constraint]:
        """Compile the constraints of distinct parameters; return them by the `id` of the parameters."""
        distinct = {id(one): one for one in params if one.constrained}
        if not distinct:
            return {}
        if len(distinct) > _MAX_CONSTRAINTS:
            raise RequestError(f"{len(distinct)} schemas in one call; at most {_MAX_CONSTRAINTS}")
        with self._encoder_lock:
            if self._constraints is None:
                tokenizer = self.require("`json_schema` or `regex`")
                with self._lock:
                    self._constraints = Constraints(tokenizer, vocab_size, eos_ids)
        return {key: self._constraints.make(one) for key, one in distinct.items()}

    def decode(self, request: Request) -> str:
        """Return the output text, cut at the stop string that ended it."""
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
        """Return the finish reason if a stop string occurs at the end of the output."""
        # A token has at least one byte, so a match cannot begin before this many tokens.
        window = max(len(stop.encode()) for stop in request.params.stop) + 1
        tail = self._decode(request, request.token_ids[self._tail_start(request, window) :])
        for stop in request.params.stop:
            if stop in tail:
                return FinishReason(kind="stop", matched=stop)
        return None

    def _tail_start(self, request: Request, count: int) -> int:
        """Return where the last `count` tokens with text begin in the output."""
        start = max(request.prompt_len, len(request.token_ids) - count)
        hidden = self._special if request.params.skip_special_tokens else frozenset()
        if not hidden or hidden.isdisjoint(request.token_ids[start:]):
            return start
        start = len(request.token_ids)
        while start > request.prompt_len and count > 0:
            start -= 1
            count -= request.token_ids[start] not in hidden
        return start

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
        """Return the tokenizer; raise RequestError that `what` needs one."""
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this engine was started without one")
        return self._tokenizer


def load_codec(args: EngineArgs) -> TextCodec:
    if args.skip_tokenizer_init:
        return TextCodec(None)
    path = args.tokenizer_path or args.model_path
    # Without these files transformers makes an empty tokenizer instead of failing.
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
