"""Whether an engine gives the probe's tokens the log-probs the trainer gave them."""

from __future__ import annotations

from statistics import fmean

from slime.core.errors import WeightMismatchError
from slime.core.reports import Probe
from slime.core.types import EngineInfo
from slime.utils.sync_http import post_json

_TIMEOUT_S = 120.0


def check_probe(engine: EngineInfo, probe: Probe) -> None:
    """Engines scale log-probs of what they generate by the temperature, so each token is asked for as
    the one generated next."""
    found = _log_probs(engine.url, probe)
    # The mean: a single improbable token is off by half a unit in bf16 with the right weights.
    gap = fmean(abs(a - b) for a, b in zip(found, probe.log_probs, strict=True))
    if not gap <= probe.tolerance:
        raise WeightMismatchError(
            f"engine {engine.url} does not compute what the trainer computes: log-probs of the probe "
            f"tokens differ by {gap:.3g} on average (allowed {probe.tolerance:g}); its weights are not those that "
            "were sent, or its model differs"
        )


def _log_probs(url: str, probe: Probe) -> list[float]:
    tokens = list(probe.tokens)
    body = {
        "input_ids": [tokens[:end] for end in range(1, len(tokens))],
        "sampling_params": {"temperature": probe.temperature, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [[token] for token in tokens[1:]],
    }
    replies = post_json(f"{url}/generate", body, timeout=_TIMEOUT_S)
    return [reply["meta_info"]["output_token_ids_logprobs"][0][0][0] for reply in replies]
