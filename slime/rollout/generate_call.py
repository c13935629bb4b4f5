"""One request to an engine for one sample: token ids in, token ids and log-probs out."""

from __future__ import annotations

import base64
import json
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.core.errors import UserError
from slime.core.types import Sample, Status
from slime.data.prompt_data import encode_prompt
from slime.data.tokenizer import load_tokenizer
from slime.rollout.engine_pool import current_pool
from slime.rollout.samples import clone_sample
from slime.rollout.sampling import SamplingParams, hash32
from slime.rollout.user_code import Calls, on_main_loop

if TYPE_CHECKING:
    from slime.config.arguments import Args

_MAX_ATTEMPTS = 20
_FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(kw_only=True)
class Run:
    """What the turns of one rollout share. `aborting`: enough groups are done, the rest shall end."""

    seed_parts: tuple[object, ...] = ()  # empty: the engines draw their own seeds
    keep_partial: bool = False
    aborting: bool = False
    calls: Calls = field(default_factory=Calls)  # of user code, under way


current_run: ContextVar[Run | None] = ContextVar("current_run", default=None)


async def generate(args: Args, sample: Sample, sampling_params: SamplingParams) -> Sample:
    """Continue the sample by one turn of the engine; the public building block of custom generation.

    `max_new_tokens` bounds the whole response: what the sample has already counts. A request that
    someone else aborted (a weight update, an engine that restarted) is made again.
    """
    run = current_run.get()
    if not sample.tokens:
        sample.tokens = _encode(args, sample)
    attempts = 0
    while attempts < _MAX_ATTEMPTS:
        if is_aborting():
            sample.status = Status.ABORTED
            return sample
        if (payload := _payload(args, sample, sampling_params, run)) is None:
            sample.status = Status.TRUNCATED
            return sample
        before = clone_sample(sample)
        reply = await on_main_loop(current_pool().generate(payload, session_id=_session(sample)))
        _append(args, sample, reply)
        if sample.status != Status.ABORTED or run is None or run.aborting:
            return sample
        if not run.keep_partial:
            sample.__dict__.update(before.__dict__)
        # A long response may be cut by many weight updates, and comes forward all the same.
        attempts = attempts + 1 if sample.response_length == before.response_length else 0
    raise UserError(
        f"the engines aborted the request of sample {sample.index} {_MAX_ATTEMPTS} times in a row"
    )


def current_calls() -> Calls | None:
    run = current_run.get()
    return None if run is None else run.calls


def is_aborting() -> bool:
    run = current_run.get()
    return run is not None and run.aborting


def _encode(args: Args, sample: Sample) -> list[int]:
    if not isinstance(sample.prompt, str):
        raise UserError(
            "the prompt is a list of messages, which has tokens only once it is rendered: "
            "add --apply-chat-template"
        )
    tokenizer = load_tokenizer(args.hf_checkpoint)
    return encode_prompt(tokenizer, sample.prompt, rendered=args.apply_chat_template)


def _payload(
    args: Args, sample: Sample, sampling_params: SamplingParams, run: Run | None
) -> dict[str, Any] | None:
    """The request, or None when the sample has no room left for a token."""
    limit, context = sampling_params["max_new_tokens"], args.rollout_max_context_len
    if limit is None and context is None:
        raise UserError("how long may a response be? Set --rollout-max-response-len")
    room = min(
        (limit if limit is not None else sys.maxsize) - sample.response_length,
        (context if context is not None else sys.maxsize) - len(sample.tokens),
    )
    if room <= 0:
        return None
    params = {**sampling_params, "max_new_tokens": room}
    if run is not None and run.seed_parts and sample.index is not None:
        place = (sample.response_length,) if sample.response_length else ()
        params["sampling_seed"] = hash32(*run.seed_parts, sample.index, *place)
    payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    return {**payload, "return_routed_experts": True} if _replays(args) else payload


def _session(sample: Sample) -> str | None:
    if sample.session_id is not None:
        return sample.session_id
    return None if sample.group_index is None else f"group-{sample.group_index}"


def _append(args: Args, sample: Sample, reply: dict[str, Any]) -> None:
    meta = reply["meta_info"]
    tokens = reply["output_ids"]
    finish = meta["finish_reason"]
    sample.append_response_tokens(
        tokens=tokens,
        log_probs=[entry[0] for entry in meta["output_token_logprobs"]],
        weight_versions=_weight_versions(meta, len(tokens)),
    )
    sample.response += _without_end_token(args, reply["text"], finish)
    sample.status = _FINISHED[finish["type"]]
    if _replays(args) and meta.get("routed_experts") is not None:
        sample.rollout_routed_experts = decode_experts(args.hf_checkpoint, meta["routed_experts"])


def _replays(args: Args) -> bool:
    return args.use_rollout_routing_replay


def decode_experts(checkpoint: str, text: str) -> np.ndarray:
    """[tokens - 1, layers, experts per token] from the engine's base64."""
    layers, width = _expert_shape(checkpoint)
    flat = np.frombuffer(base64.b64decode(text), np.int32)
    return flat.reshape(-1, layers, width).astype(np.int16)


@cache
def _expert_shape(checkpoint: str) -> tuple[int, int]:
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    return config["num_hidden_layers"], config["num_experts_per_tok"]


def _without_end_token(args: Args, text: str, finish: dict[str, Any]) -> str:
    """Asked to leave stop strings in the text, engines leave in the token that ended it as well."""
    matched = finish.get("matched")
    if not isinstance(matched, int):
        return text
    return text.removesuffix(str(load_tokenizer(args.hf_checkpoint).decode([matched])))


def _weight_versions(meta: dict[str, Any], count: int) -> list[int]:
    """One version per token, from the spans of engines that report them."""
    spans = meta.get("weight_versions")
    if not spans:
        return [_version(meta.get("weight_version"))] * count
    versions: list[int] = []
    for span in spans:
        versions += [_version(span["version"])] * (span["end"] - span["start"])
    return versions


def _version(text: str | None) -> int:
    """Engines that never got an update name their version in words ("default"): 0."""
    return int(text) if text is not None and text.isdecimal() else 0
