"""Append text that the model did not generate, such as tool output, to a response."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from slime.core.types import Sample, Status
from slime.data.tokenizer import encode_content, load_tokenizer
from slime.rollout.sampling import SamplingParams, tokens_left

if TYPE_CHECKING:
    from slime.config.arguments import Args


def add_observation(
    args: Args,
    sample: Sample,
    text: str,
    params: SamplingParams,
    *,
    before: str = "",
    after: str = "",
) -> bool:
    """Append `text`, masked out of the loss; return False and mark the sample TRUNCATED if it is too long.

    Only the new text is tokenized. `text` is content: an `<|im_end|>` in it does not end a turn. Put markup
    that must become control tokens into `before` and `after`.
    """
    encode = partial(load_tokenizer(args.hf_checkpoint).encode, add_special_tokens=False)
    content = encode_content(args.hf_checkpoint, text)
    tokens = [*encode(before), *content, *encode(after)]
    left = tokens_left(args, sample, params)
    if left is not None and len(tokens) >= left:  # at least one token must be left for the model
        sample.status = Status.TRUNCATED
        return False
    sample.append_response_tokens(tokens=tokens, trainable=False)
    sample.response += before + text + after
    return True
