"""On-policy distillation (`--use-opd`): the task's reward, and log-probs of a served teacher.

The teacher's log-probs are not a reward: they travel with the sample to the trainer, which subtracts each
token's gap to them from its advantage. A teacher inside the trainer (`--opd-type megatron`) is not used here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.core.errors import UserError
from slime.core.types import Sample
from slime.rollout.base_types import Reward
from slime.rollout.rm_hub import async_rm
from slime.rollout.train_data import group_rewards
from slime.utils.http import post

if TYPE_CHECKING:
    from slime.config.arguments import Args


async def reward_func(args: Args, sample: Sample) -> Reward:
    """Return the reward of `--rm-type` or of the sample's own type; 0 without one."""
    if args.opd_type == "sglang" and sample.response_length:  # none if the prompt fills the context
        sample.teacher_log_probs = await served_log_probs(args.rm_url or "", sample)
    if not (args.rm_type or sample.metadata.get("rm_type")):
        return 0.0
    return await async_rm(args.replace(custom_rm_path=None), sample)


def post_process_rewards(
    args: Args, samples: list[Sample], **kwargs: Any
) -> tuple[list[float], list[float]]:
    """Return raw and normalised rewards as without --custom-reward-post-process-path.

    The teacher's log-probs, which earlier versions read here, are on the samples already.
    """
    raw, rewards = group_rewards(args.replace(custom_reward_post_process_path=None), samples)
    return raw.tolist(), rewards.tolist()


async def served_log_probs(url: str, sample: Sample) -> list[float]:
    """Return the teacher's log-prob of each response token, from an engine with SGLang's protocol."""
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
            f"--rm-url {url}: the teacher's log-probs are not those of the response's tokens"
        )
    return [float(entry[0]) for entry in entries]
