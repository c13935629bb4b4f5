"""Append text that the model did not generate, such as tool output, to a response."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.data.images import load_image_processor
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
    images: Sequence[bytes] = (),
) -> bool:
    """Append `text`, masked out of the loss; return False and mark the sample TRUNCATED if it is too long.

    Only the new text is tokenized. `text` is content: an `<|im_end|>` in it does not end a turn. Put markup
    that must become control tokens into `before` and `after`. `images` are files of images, such as a
    screenshot; `before` and `after` hold one placeholder of the model per image, in their order.
    """
    encode = partial(load_tokenizer(args.hf_checkpoint).encode, add_special_tokens=False)
    content = encode_content(args.hf_checkpoint, text)
    tokens = [*encode(before), *content, *encode(after)]
    if images:
        _check_count(args, sample, len(images))
        tokens = load_image_processor(args.hf_checkpoint).expand(tokens, list(images))
    left = tokens_left(args, sample, params)
    if left is not None and len(tokens) >= left:  # at least one token must be left for the model
        sample.status = Status.TRUNCATED
        return False
    sample.append_response_tokens(tokens=tokens, trainable=False)
    if images:
        sample.append_images(list(images))
    sample.response += before + text + after
    return True


def _check_count(args: Args, sample: Sample, count: int) -> None:
    limit = args.limit_mm_data_per_request.get("image")
    total = len(sample.image_files) + count
    if limit is not None and total > limit:
        raise UserError(f"a sample with {total} images; --limit-mm-data-per-request allows {limit}")
