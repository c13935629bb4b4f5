"""`generate`: send one sample to an engine, token ids in, token ids and log-probs out.

Sampling parameters have the engines' format. With deterministic inference each request gets a seed,
a hash of --rollout-seed, sample index and response length (`_payload`); else engines choose.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.data.images import (
    data_uri,
    given_tokens,
    load_image_processor,
    placeholders_of,
    wrote_placeholder,
)
from slime.data.tokenizer import encode_prompt, load_tokenizer
from slime.rollout.context import GenerationState, RolloutContext, is_aborting
from slime.rollout.hook_calls import on_main_loop

if TYPE_CHECKING:
    from slime.config.arguments import Args

SamplingParams = dict[str, Any]  # the engine's JSON object; hooks may edit it

_MAX_ABORTS = 20  # in a row; connection errors are retried in engine_pool.py


def rollout_sampling_params(args: Args) -> SamplingParams:
    return sampling_params(
        args,
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        max_new_tokens=args.rollout_max_response_len,
    )


def sampling_params(
    args: Args, *, temperature: float, top_p: float, top_k: int, max_new_tokens: int | None
) -> SamplingParams:
    params: SamplingParams = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_new_tokens": max_new_tokens,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "spaces_between_special_tokens": False,
    }
    if args.rollout_stop:
        # The stop string ("</search>") stays part of the response; the end-of-text token does not.
        params |= {"stop": args.rollout_stop, "no_stop_trim": True}
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = args.rollout_stop_token_ids
    return params


def hash32(*parts: object) -> int:
    """Return a number in [0, 2**31) that is the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


async def generate(args: Args, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Let an engine continue the sample; the public building block of custom generate functions.

    `max_new_tokens` limits the whole response, including the tokens that the sample already has. A request
    that was aborted (an engine restarted, or SGLang replaced a LoRA adapter) is sent again: with the tokens
    it got if the run keeps partial responses (`keep_partial`), else from the start of the response.
    A response ends, TRUNCATED, where the model writes the placeholder of an image or a video: an engine
    would read it as an image that was not sent (SGLang answers 500, or hangs).
    """
    context = RolloutContext.current()
    generation = context.generation
    if not sample.tokens:
        sample.tokens = _encode(args, sample)
    attempts = 0
    while attempts < _MAX_ABORTS:
        if is_aborting():
            sample.status = Status.ABORTED
            return sample
        if (payload := _payload(args, sample, sampling_params, generation)) is None:
            sample.status = Status.TRUNCATED
            return sample
        before = sample.clone()
        reply = await on_main_loop(context.pool.generate(payload, session_id=_session(sample)))
        _append_reply(args, sample, reply)
        constrained = {"json_schema", "regex"} & sampling_params.keys()
        if sample.status == Status.ABORTED and constrained:  # engines parse from a request's start
            sample.__dict__.update({**before.__dict__, "status": Status.ABORTED})
        if sample.status != Status.ABORTED or generation is None or generation.aborting:
            return sample
        if not generation.keep_partial:
            sample.__dict__.update(before.__dict__)
        # A long response may be aborted many times; an attempt that added tokens does not count.
        attempts = attempts + 1 if sample.response_length == before.response_length else 0
    raise UserError(
        f"the engines aborted the request of sample {sample.index} {_MAX_ABORTS} times in a row"
    )


def tokens_left(args: Args, sample: Sample, sampling_params: SamplingParams) -> int | None:
    """Return how many tokens the response may still get, 0 or less if none; None without any limit."""
    limit, context = sampling_params["max_new_tokens"], args.rollout_max_context_len
    left = [] if limit is None else [limit - sample.response_length]
    left += [] if context is None else [context - len(sample.tokens)]
    return min(left, default=None)


def _encode(args: Args, sample: Sample) -> list[int]:
    if not isinstance(sample.prompt, str):
        raise UserError(
            "the prompt is a list of messages, which has to be rendered before it can be tokenized: "
            "add --apply-chat-template"
        )
    tokenizer = load_tokenizer(args.hf_checkpoint)
    tokens = encode_prompt(tokenizer, sample.prompt, rendered=args.apply_chat_template)
    if sample.image_files:
        tokens = load_image_processor(args.hf_checkpoint).expand(tokens, sample.image_files)
    return tokens


def _payload(
    args: Args,
    sample: Sample,
    sampling_params: SamplingParams,
    generation: GenerationState | None,
) -> dict[str, Any] | None:
    """Return the request, or None if the response must end: at a length limit, or after a placeholder."""
    max_new_tokens = tokens_left(args, sample, sampling_params)
    if max_new_tokens is None:
        raise UserError("the response length has no limit: set --rollout-max-response-len")
    if max_new_tokens <= 0 or wrote_placeholder(sample, args.hf_checkpoint):
        return None
    params = {**sampling_params, "max_new_tokens": max_new_tokens}
    if "min_new_tokens" in params:
        wanted = max(params["min_new_tokens"] - sample.response_length, 0)
        params["min_new_tokens"] = min(wanted, max_new_tokens)
    if generation is not None and generation.seed_parts and sample.index is not None:
        offset = (sample.response_length,) if sample.response_length else ()
        params["sampling_seed"] = hash32(*generation.seed_parts, sample.index, *offset)
    payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    if placeholders := placeholders_of(args.hf_checkpoint):
        params["stop_token_ids"] = sorted({*(params.get("stop_token_ids") or ()), *placeholders})
    if sample.image_files:
        payload |= image_payload(args, sample)
    if args.use_rollout_routing_replay:
        payload["return_routed_experts"] = True
    return payload


def image_payload(args: Args, sample: Sample) -> dict[str, Any]:
    """Return the images of a request, and its tokens as the engine takes them.

    SGLang repeats the placeholder of an image itself; the embedded engine takes the tokens of the sample.
    """
    payload: dict[str, Any] = {"image_data": [data_uri(file) for file in sample.image_files]}
    if args.rollout_engine == "sglang":
        processor = load_image_processor(args.hf_checkpoint)
        given = given_tokens(sample)
        payload["input_ids"] = processor.collapse(sample.tokens, given, sample.image_files)
    return payload


def _session(sample: Sample) -> str | None:
    if sample.session_id is not None:
        return sample.session_id
    return None if sample.group_index is None else f"group-{sample.group_index}"


def _append_reply(args: Args, sample: Sample, reply: dict[str, Any]) -> None:
    meta = reply["meta_info"]
    num_read = meta.get("prompt_tokens", len(sample.tokens))
    if sample.image_files and num_read != len(sample.tokens):
        raise UserError(
            f"the engine counts {num_read} tokens in a prompt with images, the processor of --hf-checkpoint "
            f"{len(sample.tokens)}: start the engine with the same preprocessor_config.json"
        )
    sample.append_response_tokens(
        args,
        tokens=reply["output_ids"],
        log_probs=[entry[0] for entry in meta["output_token_logprobs"]],
        meta_info=meta,
        text=_without_end_token(args, reply["text"], meta["finish_reason"]),
    )
    if sample.status is Status.COMPLETED and wrote_placeholder(sample, args.hf_checkpoint):
        sample.status = Status.TRUNCATED


def _without_end_token(args: Args, text: str, finish: dict[str, Any]) -> str:
    """Remove the end token, which engines that keep stop strings (`no_stop_trim`) keep too."""
    matched = finish.get("matched")
    if not isinstance(matched, int):
        return text
    return text.removesuffix(str(load_tokenizer(args.hf_checkpoint).decode([matched])))
