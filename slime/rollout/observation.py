"""Text that did not come from the model, such as a tool's output, as part of a response."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from slime.core.types import Sample, Status
from slime.data.tokenizer import encode_content, load_tokenizer
from slime.rollout.sampling import SamplingParams

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
    """Append `text` to the response, out of the loss; False, with the sample TRUNCATED, if it is too long.

    The tokens the sample has stay as they are: only the new text is tokenized. `text` is content: an
    `<|im_end|>` in it ends no turn. What frames it and is meant so goes into `before` and `after`.
    """
    frame = partial(load_tokenizer(args.hf_checkpoint).encode, add_special_tokens=False)
    content = encode_content(args.hf_checkpoint, text)
    tokens = [*frame(before), *content, *frame(after)]
    limit, context = params["max_new_tokens"], args.rollout_max_context_len
    room = min(
        (sys.maxsize if limit is None else limit) - sample.response_length,
        (sys.maxsize if context is None else context) - len(sample.tokens),
    )
    if len(tokens) >= room:  # one token at least must be left for the model
        sample.status = Status.TRUNCATED
        return False
    sample.append_response_tokens(tokens=tokens, trainable=False)
    sample.response += before + text + after
    return True
