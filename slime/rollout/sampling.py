"""Sampling parameters in the engines' format, and reproducible seeds."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.config.arguments import Args

SamplingParams = dict[str, Any]  # the engine's JSON object; hooks may edit it


def rollout_sampling_params(args: Args) -> SamplingParams:
    return _sampling_params(
        args,
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
        max_new_tokens=args.rollout_max_response_len,
    )


def eval_sampling_params(
    args: Args, *, temperature: float, top_p: float, top_k: int, max_response_len: int | None
) -> SamplingParams:
    return _sampling_params(
        args, temperature=temperature, top_p=top_p, top_k=top_k, max_new_tokens=max_response_len
    )


def hash32(*parts: object) -> int:
    """Return a number in [0, 2**31) that is the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def _sampling_params(
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
