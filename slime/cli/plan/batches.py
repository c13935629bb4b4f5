"""How many samples and tokens meet on a rank at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime.cli.plan.model_shape import Shape
from slime.cli.plan.rank_layout import Sizes
from slime.config.arguments import Args

ASSUMED_PROMPT = 1024


@dataclass(frozen=True, kw_only=True)
class Batches:
    """32 prompts x 8 samples = 256 in one step; DP 1: all of them on each group of 64 GPUs."""

    samples_per_rollout: int
    steps_per_rollout: int
    global_batch_size: int
    samples_per_dp_rank: int  # in one step
    longest_sample: int
    tokens_per_gpu: int  # of the largest micro-batch
    log_prob_tokens_per_gpu: int
    micro_batches: int  # of a step, if every sample were as long as allowed


def batches_of(args: Args, sizes: Sizes, shape: Shape) -> Batches:
    longest = longest_sample(args, shape)
    share = math.ceil(longest / sizes.cp)
    samples = math.ceil(args.global_batch_size / sizes.dp)
    if args.use_dynamic_batch_size:
        tokens = max(args.max_tokens_per_gpu or 0, share)
        log_prob_tokens = max(args.log_probs_max_tokens_per_gpu or tokens, share)
        per_micro_batch = max(tokens // share, 1)
    else:
        per_micro_batch = args.micro_batch_size
        tokens = log_prob_tokens = per_micro_batch * share
    return Batches(
        samples_per_rollout=args.rollout_batch_size * args.n_samples_per_prompt,
        steps_per_rollout=args.num_steps_per_rollout,
        global_batch_size=args.global_batch_size,
        samples_per_dp_rank=samples,
        longest_sample=longest,
        tokens_per_gpu=min(tokens, samples * share),
        log_prob_tokens_per_gpu=min(log_prob_tokens, samples * share * args.num_steps_per_rollout),
        micro_batches=math.ceil(samples / per_micro_batch),
    )


def longest_sample(args: Args, shape: Shape) -> int:
    """Prompt and longest response; prompts without a limit count as 1024 tokens."""
    limit = args.rollout_max_context_len or shape.context
    prompt = args.rollout_max_prompt_len or ASSUMED_PROMPT
    return min(limit, prompt + (args.rollout_max_response_len or 0))
