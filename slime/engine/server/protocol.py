"""SGLang's /generate: from a JSON body to requests, and from finished requests to a JSON reply."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from slime.engine.lora.store import Adapter
from slime.engine.scheduler.request import FinishReason, Request
from slime.engine.scheduler.sampling_params import (
    MOST_REQUESTS,
    RequestError,
    SamplingParams,
    parse_sampling_params,
)
from slime.engine.scheduler.speculation import DraftHistory
from slime.engine.server.image_data import Images, expand_prompts, place_all
from slime.engine.server.text import TextCodec

if TYPE_CHECKING:
    from slime.engine.engine import Engine

# Top-level keys of SGLang that this engine does not support. Keys unknown to SGLang are ignored, as in
# SGLang.
_UNSUPPORTED = (
    "input_embeds", "video_data", "audio_data", "token_ids_logprob", "return_sampling_mask",
    "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "return_hidden_states",
    "return_indexer_topk", "return_entropy", "session_params", "custom_logit_processor", "cache_salt",
    "extra_key", "bootstrap_host",
)  # fmt: skip
_MAX_TOP_LOG_PROBS = 20
_MAX_TOKENS = 1 << 25  # per call: every copy of a prompt has its own list
_LONGEST_RID = 512  # characters; each of `n` samples has its own copy
_RID_PREFIX = f"{secrets.token_hex(8)}-"
_rid_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the engine: a request's tokens must fit into both the context and the cache."""

    context_len: int
    cache_tokens: int
    vocab_size: int
    routed_experts: bool  # whether requests can ask for routed experts
    images: Images = "this engine takes no images"


@dataclass(kw_only=True)
class Generation:
    """The requests of one /generate call, in the order of the reply."""

    requests: list[Request]
    is_batch: bool
    stream: bool
    with_token_text: bool  # return_text_in_logprobs


def parse_generate(body: Any, engine: Engine, limits: Limits) -> Generation:
    """Parse a body whose prompts are token ids and whose images are files; raise RequestError if it is invalid."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    _refuse_unsupported(body)
    codec = engine.codec
    if body.get("return_routed_experts") and not limits.routed_experts:
        raise RequestError(
            "`return_routed_experts`: start the engine with --enable-return-routed-experts"
        )
    if body.get("return_text_in_logprobs"):
        codec.require("`return_text_in_logprobs`")
    prompts, is_batch = _prompts(body)
    count = len(prompts)
    rids = _rids(body.get("rid"), count, is_batch)
    all_params = _spread(body.get("sampling_params") or {}, count, "sampling_params", dict)
    log_prob_flags = _spread(body.get("return_logprob") or False, count, "return_logprob", bool)
    num_top = _spread(body.get("top_logprobs_num") or 0, count, "top_logprobs_num", int)
    start_len = body.get("logprob_start_len")
    start_lens = _spread(-1 if start_len is None else start_len, count, "logprob_start_len", int)
    adapters = _adapters(body.get("lora_path"), count, engine.find_adapter)
    images = place_all(prompts, body, limits.images)
    stream = bool(body.get("stream"))
    parsed = _parse_params(all_params, limits)
    _check_total(prompts, parsed)
    constraints = codec.constrain(parsed, limits.vocab_size, engine.eos_ids)
    requests: list[Request] = []
    for i, ids in enumerate(prompts):
        params = _fit(parsed[i], all_params[i], len(ids), limits)
        _check_ids(ids, limits)
        start_len = _check_start_len(start_lens[i], len(ids)) if log_prob_flags[i] else -1
        _check_top(num_top[i], start_len, return_logprob=log_prob_flags[i])
        if params.stop:
            codec.require("`stop`")
        constraint = constraints.get(id(parsed[i]))
        for copy in range(params.n):
            request = Request(
                rid=rids[i] if params.n == 1 else f"{rids[i]}_{copy}",
                token_ids=list(ids),
                prompt_len=len(ids),
                params=params,
                seed=_seed(params, copy, engine),
                eos_ids=frozenset() if params.ignore_eos else engine.eos_ids,
                return_logprob=log_prob_flags[i],
                num_top_log_probs=num_top[i],
                constraint=None if constraint is None else constraint.copy(),
                return_routed_experts=bool(body.get("return_routed_experts")),
                logprob_start_len=start_len,
                stream=stream,
                adapter=adapters[i],
                images=images[i],
            )
            requests.append(request)
    return Generation(
        requests=requests,
        is_batch=is_batch or len(requests) > 1,
        stream=stream,
        with_token_text=bool(body.get("return_text_in_logprobs")),
    )


def make_reply(request: Request, engine: Engine, with_token_text: bool) -> dict[str, Any]:
    """Return the reply to one request in its current state."""
    output_ids, codec = request.output_ids, engine.codec
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": _finish_reason(request.finish, len(output_ids)),
        "prompt_tokens": request.prompt_len,
        "completion_tokens": len(output_ids),
        "cached_tokens": request.num_cached,
        "cached_tokens_details": None,
        "reasoning_tokens": 0,
        "num_retractions": request.num_retractions,
        "weight_version": engine.version_of(request),
        "dp_rank": None,
        "e2e_latency": time.perf_counter() - request.arrival,
        "response_sent_to_client_ts": time.time(),
    }
    if request.finish is not None:
        meta["weight_versions"] = [dataclasses.asdict(span) for span in request.version_spans]
    if request.return_logprob:
        meta |= _log_probs(request, output_ids, codec if with_token_text else None)
    if request.routed_experts is not None:
        meta["routed_experts"] = request.routed_experts
    if request.draft_history is not None and request.draft_history.num_proposed:
        meta |= _draft_metrics(request.draft_history, len(output_ids))
    reply: dict[str, Any] = {"output_ids": output_ids, "meta_info": meta}
    return {"text": codec.decode(request), **reply} if codec.available else reply


def _log_probs(request: Request, output_ids: list[int], codec: TextCodec | None) -> dict[str, Any]:
    """Return (log-prob, token id, text) triples; the first requested prompt token has no log-prob."""

    def triples(values: Iterable[float | None], tokens: Iterable[int]) -> list[list[Any]]:
        pairs = zip(values, tokens, strict=False)
        return [
            [value, token, codec.decode_token(token) if codec else None] for value, token in pairs
        ]

    prompt: list[list[Any]] = []
    if request.logprob_start_len >= 0:
        tokens = request.token_ids[request.logprob_start_len : request.prompt_len]
        prompt = triples([None, *request.input_log_probs], tokens)
    reply: dict[str, Any] = {
        "input_token_logprobs": prompt,
        "output_token_logprobs": triples(request.output_log_probs, output_ids),
        "output_token_logprobs_length": len(output_ids),
    }
    if request.num_top_log_probs:
        rows = request.top_log_probs[: len(output_ids)]
        reply["input_top_logprobs"] = []
        reply["output_top_logprobs"] = [
            triples([value for _, value in row], [token for token, _ in row]) for row in rows
        ]
    return reply


def _draft_metrics(history: DraftHistory, num_output: int) -> dict[str, Any]:
    return {
        "spec_accept_rate": history.num_correct / history.num_proposed,
        "spec_accept_length": num_output / history.num_steps,
        "spec_num_correct_drafts": history.num_correct,
        "spec_num_proposed_drafts": history.num_proposed,
        "spec_verify_ct": history.num_steps,
    }


def _seed(params: SamplingParams, copy: int, engine: Engine) -> int:
    seed = engine.new_seed() if params.sampling_seed is None else params.sampling_seed + copy
    return seed % 2**64


def _check_start_len(start_len: int, num_prompt: int) -> int:
    if not -1 <= start_len <= num_prompt:
        raise RequestError(
            f"logprob_start_len {start_len} is outside of the {num_prompt} prompt tokens."
        )
    return start_len


def _check_top(count: int, start_len: int, *, return_logprob: bool) -> None:
    if not 0 <= count <= _MAX_TOP_LOG_PROBS:
        raise RequestError(f"top log-probs: from 0 to {_MAX_TOP_LOG_PROBS} tokens, got {count}")
    if count and (start_len >= 0 or not return_logprob):
        raise RequestError(
            "`top_logprobs_num` needs return_logprob, and is not supported for prompt tokens: remove "
            "logprob_start_len"
        )


def _finish_reason(finish: FinishReason | None, length: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": length}
    return {
        "type": "abort",
        "message": finish.message,
        "status_code": finish.status_code,
        "err_type": None,
    }


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for key in _UNSUPPORTED:
        value = body.get(key)
        if value not in (None, False, 0, "", []):
            raise RequestError(f"`{key}` is not supported by this engine")


def encode_text(body: Any, codec: TextCodec, limits: Limits, deadline: float) -> Any:
    """Return the body with `text` replaced by token ids; a body without text is returned unchanged."""
    text = body.get("text") if isinstance(body, dict) else None
    if text is None or body.get("input_ids") is not None:
        return body
    texts = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(t, str) for t in texts):
        raise RequestError("`text` must be a string or a non-empty list of strings")
    _check_count(len(texts))
    ids: list[list[int]] = []
    for one in texts:
        if time.monotonic() > deadline:
            raise RequestError(
                "tokenizing these texts takes too long: send fewer of them at a time"
            )
        ids.append(codec.encode(one, limits.context_len))
    if not all(ids):
        raise RequestError("the prompt has no tokens")
    ids = expand_prompts(ids, body, limits.images)
    return {**body, "text": None, "input_ids": ids if isinstance(text, list) else ids[0]}


def _prompts(body: dict[str, Any]) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("exactly one of `text` and `input_ids` must be given")
    if isinstance(ids, list):
        _check_count(len(ids) if ids and isinstance(ids[0], list) else 1)
    if _is_id_list(ids):
        return [ids], False
    if isinstance(ids, list) and ids and all(_is_id_list(row) for row in ids):
        return ids, True
    raise RequestError("`input_ids` must be a non-empty list of token ids, or a list of such lists")


def _check_count(count: int) -> None:
    if count > MOST_REQUESTS:
        raise RequestError(f"{count} requests in one call; at most {MOST_REQUESTS}, `n` counted")


def _check_total(prompts: list[list[int]], params: list[SamplingParams]) -> None:
    """Refuse too many requests or tokens in one call before the first request is created."""
    _check_count(sum(p.n for p in params))
    tokens = sum(len(ids) * p.n for ids, p in zip(prompts, params, strict=True))
    if tokens > _MAX_TOKENS:
        raise RequestError(
            f"{tokens} prompt tokens in one call, `n` counted; at most {_MAX_TOKENS}: send fewer prompts"
        )


def _parse_params(given: list[dict[str, Any]], limits: Limits) -> list[SamplingParams]:
    """Return the parameters of each prompt; shared ones are parsed and checked once."""
    known: dict[int, SamplingParams] = {}
    for one in given:
        if id(one) not in known:
            known[id(one)] = parse_sampling_params(one)
            _check_param_ids(known[id(one)], limits)
    return [known[id(one)] for one in given]


def _is_id_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _rids(given: Any, count: int, is_batch: bool) -> list[str]:
    if given is None:
        return [f"{_RID_PREFIX}{next(_rid_numbers)}" for _ in range(count)]
    names = given if isinstance(given, list) else [given]
    if any(isinstance(name, str) and len(name) > _LONGEST_RID for name in names):
        raise RequestError(f"`rid` may have at most {_LONGEST_RID} characters")
    if isinstance(given, str):
        return [f"{given}_{i}" for i in range(count)] if is_batch else [given]
    if (
        isinstance(given, list)
        and len(given) == count
        and all(isinstance(rid, str) for rid in given)
    ):
        if len(set(given)) < count:
            raise RequestError("`rid` has duplicates")
        return given
    raise RequestError(f"`rid` must be a string or a list of {count} strings")


def _spread(given: Any, count: int, name: str, kind: type) -> list[Any]:
    """Return a list with one value per prompt; a single value applies to all prompts."""
    values = given if isinstance(given, list) else [given] * count
    if len(values) != count or not all(isinstance(value, kind) for value in values):
        raise RequestError(f"`{name}` must be one {kind.__name__} or a list of {count} of them")
    return values


def _adapters(
    given: Any, count: int, find_adapter: Callable[[str], Adapter]
) -> list[Adapter | None]:
    names = given if isinstance(given, list) else [given] * count
    if len(names) != count or not all(name is None or isinstance(name, str) for name in names):
        raise RequestError(f"`lora_path` must be a name or a list of {count} names and nulls")
    return [find_adapter(name) if name else None for name in names]


def _fit(
    params: SamplingParams, given: dict[str, Any], num_prompt: int, limits: Limits
) -> SamplingParams:
    """Check that the request can ever run; the default max_new_tokens shrinks to what fits."""
    context = limits.context_len
    if num_prompt >= context:
        raise RequestError(
            f"The input ({num_prompt} tokens) is longer than the model's context length ({context} tokens)."
        )
    available = min(context, limits.cache_tokens) - num_prompt
    if given.get("max_new_tokens") is None:
        params = dataclasses.replace(
            params, max_new_tokens=max(0, min(params.max_new_tokens, available))
        )
    wanted = params.max_new_tokens
    if num_prompt + wanted > context:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
            f"requested a total of {num_prompt + wanted} tokens: {num_prompt} tokens from the input messages "
            f"and {wanted} tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit."
        )
    if max(wanted, 1) > available:
        raise RequestError(
            f"The request needs {num_prompt + max(wanted, 1)} tokens of KV cache and there are "
            f"{limits.cache_tokens}; start the engine with a larger --max-total-tokens."
        )
    return params


def _check_ids(ids: list[int], limits: Limits) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        raise RequestError(
            f"The input_ids contain {low if low < 0 else high}, outside of the vocabulary of {limits.vocab_size}."
        )


def _check_param_ids(params: SamplingParams, limits: Limits) -> None:
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        if any(not 0 <= token < limits.vocab_size for token in tokens):
            raise RequestError(f"{name} has ids outside of the vocabulary of {limits.vocab_size}.")
