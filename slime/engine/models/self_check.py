"""Checks at startup that an unknown model family has the same log-probs in the engine as in Hugging Face.

Recurrent layers keep state outside of the KV cache, and other models use attention masks of their own. With
chunked prefill and batching these would silently give wrong results. So two short sequences are run through
the engine and through the original model before the first request.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from slime.core.errors import UserError
from slime.engine.kv_cache import KVCache, LayerShape, StateCache, StateShape
from slime.engine.models.attention import IMPLEMENTATION
from slime.engine.models.plain_runner import PlainRunner
from slime.engine.radix_cache import PagePool
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams
from slime.engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)
_PROMPT, _OUTPUT, _CHUNK = 24, 4, 14  # tokens: both prompts are prefilled in chunks, batched
_PAGE, _PAGES = 4, 16
# Relative to the standard deviation of the log-probs: above rounding errors, below real errors.
_TOLERANCE = {torch.float32: 0.01}
_TOLERANCE_16_BITS = 0.5


def check_served(
    model: PreTrainedModel,
    layers: dict[int, LayerShape],
    context_len: int,
    states: StateShape | None = None,
) -> None:
    """Raise UserError if the engine's log-probs differ from those of the Hugging Face model."""
    count = min(_PROMPT, context_len - _OUTPUT)
    if count < 2:
        return
    try:
        model.set_attn_implementation("eager")
    except ValueError as error:
        logger.warning("%s is served unchecked: %s", type(model).__name__, error)
        return
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    served = _run_engine(model, layers, count, states)
    expected = _reference_log_probs(model, served)
    found = torch.tensor([r.input_log_probs + r.output_log_probs for r in served])
    error = (found - expected).square().mean().sqrt()
    if error <= _TOLERANCE.get(model.dtype, _TOLERANCE_16_BITS) * expected.std() + 1e-5:
        return
    raise UserError(
        f"the embedded engine cannot serve {type(model).__name__}: with chunked prefill it gives other "
        f"log-probs than in one forward (by {error:.2g} on average); use --rollout-engine sglang"
    )


@torch.inference_mode()
def _run_engine(
    model: PreTrainedModel,
    layers: dict[int, LayerShape],
    count: int,
    states: StateShape | None,
) -> list[Request]:
    scheduler = Scheduler(
        PagePool(_PAGES, _PAGE),
        max_running=2,
        max_pages_per_request=_PAGES,
        chunk_size=_CHUNK,
        num_saved_states=None if states is None else 0,
    )
    rows = None if states is None else StateCache(states, 3, model.dtype, model.device)
    cache = KVCache(layers, _PAGES, _PAGE, model.dtype, model.device, rows)
    runner = PlainRunner(model, cache, scheduler, deterministic=False)
    requests = [_request(text, count, model) for text in range(2)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_requests:
        step = scheduler.schedule()
        output = runner.launch(step).wait()
        scheduler.complete(step)
        for request, log_prob in output.scored:
            request.input_log_probs.append(log_prob)
        for request, token, log_prob in zip(
            output.requests, output.tokens, output.log_probs, strict=True
        ):
            request.num_pending -= 1
            request.append(token, log_prob, "")
            if request.finish is not None:
                scheduler.finish(request)
    return requests


def _request(text: int, count: int, model: PreTrainedModel) -> Request:
    vocab = model.config.get_text_config().vocab_size
    return Request(
        rid=str(text),
        token_ids=[(7919 * (i + 1) * (text + 2)) % vocab for i in range(count)],
        prompt_len=count,
        params=SamplingParams(temperature=0.0, max_new_tokens=_OUTPUT),
        seed=0,
        return_logprob=True,
        logprob_start_len=0,
    )


@torch.inference_mode()
def _reference_log_probs(model: PreTrainedModel, requests: list[Request]) -> torch.Tensor:
    """Return the log-probs of all tokens but the first by the model's own attention, [2, T - 1]."""
    rows: list[torch.Tensor] = []
    model.set_attn_implementation("eager")
    try:
        for request in requests:
            ids = torch.tensor([request.token_ids], device=model.device)
            reply: Any = model(input_ids=ids, use_cache=False)
            log_probs = reply.logits[0, :-1].float().log_softmax(-1)
            rows.append(log_probs.gather(1, ids[0, 1:, None]).squeeze(1).cpu())
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    return torch.stack(rows)
