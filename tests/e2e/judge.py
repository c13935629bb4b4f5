"""A reward that asks a second, frozen model that the run serves by --sglang-config."""

from __future__ import annotations

from typing import Any

from slime.core.types import Sample
from slime.rollout.context import RolloutContext
from slime.rollout.sglang_rollout import get_model_pool, get_model_url
from slime.utils import http
from tests.e2e.gates import HELD
from tests.e2e.rewards import dense


async def score(args: Any, sample: Sample) -> float:
    """Note what the judge says about the sample; every fourth request goes to its address directly.

    Not in the rollout in which it dies: only the pool waits for its replacement.
    """
    assert sample.index is not None
    rollout_id = sample.index // (args.rollout_batch_size * args.n_samples_per_prompt)
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if sample.index % 4 or rollout_id == HELD:
        reply = await get_model_pool("judge").generate(payload)
    else:
        url, (host, port) = get_model_url(args, "judge"), args.sglang_model_routers["judge"]
        assert url == f"http://{host}:{port}/generate"
        reply = await http.post(url, payload)
    facts = reply["meta_info"]
    sample.metadata["judge"] = {
        "version": facts["weight_version"],
        "log_probs": [entry[0] for entry in facts["input_token_logprobs"][1:]],
        "policy_engines": len(RolloutContext.current().pool.urls),
    }
    return await dense(args, sample)
