"""Supervised data as a rollout (`--rollout-function-path slime.rollout.sft_rollout.generate_rollout`).

No engine is used: the response is in the data. A row is either a list of messages, whose assistant turns are
trained on, or a prompt with the response in `--label-key`, to which the end-of-text token is appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.data.images import load_image_processor, placeholders_of
from slime.data.sft_loss_mask import masked_conversation
from slime.data.tokenizer import eos_token_id, load_tokenizer
from slime.rollout.base_types import DataSource, RolloutFnTrainOutput
from slime.rollout.data_source import TracksRollouts
from slime.rollout.samples import group_index

if TYPE_CHECKING:
    from slime.config.arguments import Args


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    if evaluation:
        raise UserError(
            "the SFT rollout function does not evaluate: set --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout, or remove --eval-interval"
        )
    tracks = isinstance(data_source, TracksRollouts)
    if tracks:
        data_source.begin(rollout_id)
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            fill_response(args, sample)
    if tracks:
        data_source.finish(rollout_id, map(group_index, groups))
    samples = [sample for group in groups for sample in group]
    trained = sum(sum(sample.loss_mask or ()) for sample in samples)
    return RolloutFnTrainOutput(samples=groups, metrics={"rollout/trained_tokens": float(trained)})


# A run whose rollout function has this attribute starts no engine.
generate_rollout.needs_engines = False  # type: ignore[attr-defined]


def fill_response(args: Args, sample: Sample) -> None:
    """Set prompt and response tokens and the loss mask from the row."""
    if isinstance(sample.prompt, list):
        _fill_conversation(args, sample)
    else:
        _fill_pair(args, sample)
    limit = args.rollout_max_context_len
    if limit is not None and len(sample.tokens) > limit:
        _truncate(args, sample, limit)
    sample.reward = 0.0
    if sample.status == Status.PENDING:
        sample.status = Status.COMPLETED


def _fill_pair(args: Args, sample: Sample) -> None:
    if not isinstance(sample.label, str):
        raise UserError(
            f"sample {sample.index}: an SFT row needs the response as text: set --label-key to its key, "
            "or --input-key to a list of messages without --apply-chat-template"
        )
    tokenizer = load_tokenizer(args.hf_checkpoint)
    response = tokenizer.encode(sample.label, add_special_tokens=False)
    response.append(eos_token_id(args.hf_checkpoint))
    if args.multimodal_keys and not placeholders_of(args.hf_checkpoint).isdisjoint(response):
        raise UserError(
            f"sample {sample.index}: the response holds the placeholder of an image, which cannot be trained on"
        )
    sample.tokens = [*sample.tokens, *response]
    sample.response = sample.label
    sample.response_length = len(response)
    sample.loss_mask = [1] * len(response)


def _fill_conversation(args: Args, sample: Sample) -> None:
    tokenizer = load_tokenizer(args.hf_checkpoint)
    assert isinstance(sample.prompt, list)
    roles = {message.get("role") for message in sample.prompt}
    if sample.image_files and "assistant" not in roles and isinstance(sample.label, str):
        raise UserError(
            f"sample {sample.index}: a prompt with images and a response must be rendered: add "
            "--apply-chat-template, or make the response an assistant message"
        )
    tokens, mask = masked_conversation(
        tokenizer,
        sample.prompt,
        kind=args.loss_mask_type,
        tools=sample.metadata.get("tools"),
        template_kwargs=args.apply_chat_template_kwargs,
    )
    text = str(tokenizer.decode(tokens[mask.index(1) :]))
    if args.multimodal_keys and not placeholders_of(args.hf_checkpoint).isdisjoint(tokens):
        processor = load_image_processor(args.hf_checkpoint)
        try:
            tokens, mask = processor.expand_masked(tokens, mask, sample.image_files)
        except UserError as error:
            raise UserError(f"sample {sample.index}: {error}") from None
    start = mask.index(1)
    sample.tokens = tokens
    sample.response_length = len(tokens) - start
    sample.loss_mask = mask[start:]
    sample.response = text


def _truncate(args: Args, sample: Sample, limit: int) -> None:
    """Truncate the row; one whose prompt alone is too long keeps one response token, which is masked.

    Images after the end are dropped; the row ends before an image that does not fit.
    """
    prompt_len = len(sample.tokens) - sample.response_length
    assert sample.loss_mask is not None
    kept = max(limit - prompt_len, 1)
    if sample.image_files:
        processor = load_image_processor(args.hf_checkpoint)
        grids = [processor.pixels(file).grid for file in sample.image_files]
        places = processor.places(sample.tokens, grids)
        fitting = [
            start
            for start, grid in zip(places, grids, strict=True)
            if start + processor.num_tokens(grid) <= prompt_len + kept
        ]
        if len(fitting) < len(places):
            kept = min(kept, places[len(fitting)] - prompt_len)
        sample.multimodal_inputs = {"images": sample.image_files[: len(fitting)]}
    sample.tokens = sample.tokens[: prompt_len + kept]
    sample.loss_mask = sample.loss_mask[:kept]
    sample.response_length = kept
    sample.status = Status.TRUNCATED
    sample.remove_sample = limit <= prompt_len
