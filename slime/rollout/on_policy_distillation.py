"""Rewards of on-policy distillation (`--use-opd`): what the task pays, and what a served teacher says.

The teacher's log-probs are no reward: they go with the sample to the trainer, where each token's gap to
them is taken off its advantage. A teacher in the trainer (`--opd-type megatron`) is not asked here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.core.errors import UserError
from slime.core.types import Sample
from slime.rollout.rm_hub import Reward, async_rm
from slime.utils.http import post

if TYPE_CHECKING:
    from slime.config.arguments import Args


async def reward_func(args: Args, sample: Sample) -> Reward:
    """The reward of `--rm-type`, or of the sample's own; 0 where there is none."""
    if args.opd_type == "sglang":
        sample.teacher_log_probs = await served_log_probs(args.rm_url or "", sample)
    if not (args.rm_type or sample.metadata.get("rm_type")):
        return 0.0
    return await async_rm(args.replace(custom_rm_path=None), sample)


async def served_log_probs(url: str, sample: Sample) -> list[float]:
    """The log-prob of each response token by the model of an engine with SGLang's protocol."""
    start = len(sample.tokens) - sample.response_length
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
    }
    address = url.rstrip("/").removesuffix("/generate") + "/generate"
    reply: dict[str, Any] = await post(address, payload)
    entries = reply["meta_info"]["input_token_logprobs"][-sample.response_length :]
    tokens = [entry[1] for entry in entries]
    if tokens != sample.tokens[start:]:
        raise UserError(
            f"--rm-url {url}: the teacher answered for other tokens than those of the response"
        )
    return [float(entry[0]) for entry in entries]
