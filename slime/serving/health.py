"""Checks of engines over HTTP: do they answer, are they idle, do they compute what the trainer computes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Protocol

from slime.core.errors import WeightMismatchError
from slime.core.types import EngineInfo, Probe
from slime.utils.concurrency import call_all
from slime.utils.sync_http import HttpError, get_json, post_json
from slime.weights.engine_client import retry_flush

_FLUSH_TIMEOUT_S = 60.0
_PROBE_TIMEOUT_S = 120.0


class HasProcesses(Protocol):
    def alive(self, timeout: float) -> bool: ...


def failed_engines(
    handles: Sequence[HasProcesses],
    infos: list[EngineInfo],
    *,
    timeout: float,
    route: str = "/health",
) -> list[int]:
    """Return the indices of the engines that are dead or hang."""
    pairs = list(zip(handles, infos, strict=True))
    healthy = call_all(pairs, lambda pair: _healthy(pair[0], pair[1], timeout, route))
    return [index for index, ok in enumerate(healthy) if not ok]


def health_route(paused: bool) -> str:
    """Return the route that a working server answers in time.

    SGLang's /health generates a token, which a paused server does not. Its /server_info asks the
    scheduler too and is answered even then.
    """
    return "/server_info" if paused else "/health"


def answers(url: str, timeout: float, route: str = "/health") -> bool:
    try:
        get_json(url + route, timeout=timeout, retries=0)
    except HttpError:
        return False
    return True


def _healthy(handle: HasProcesses, info: EngineInfo, timeout: float, route: str) -> bool:
    return handle.alive(timeout) and answers(info.url, timeout, route)


def flush_until_idle(
    url: str,
    token: str | None,
    timeout_s: float = _FLUSH_TIMEOUT_S,
    *,
    answer_timeout_s: float = _FLUSH_TIMEOUT_S,
) -> None:
    """Flush a server's cache, which succeeds only once the server is idle, within `timeout_s`.

    SGLang exits when its memory is released while a request is running, so a flush goes first. A working
    server answers each attempt at once, so one that takes longer than `answer_timeout_s` hangs.
    """

    def flush() -> None:
        post_json(f"{url}/flush_cache", {}, token=token, timeout=answer_timeout_s)

    retry_flush(flush, timeout_s)


def check_probe(engine: EngineInfo, probe: Probe) -> None:
    """Raise WeightMismatchError if the engine's log-probs of the probe's tokens are not the trainer's."""
    found = _probe_log_probs(engine.url, probe)
    # The mean: a single improbable token is off by half a unit in bf16 with the right weights.
    gap = fmean(abs(a - b) for a, b in zip(found, probe.log_probs, strict=True))
    if not gap <= probe.tolerance:
        raise WeightMismatchError(
            f"engine {engine.url} does not compute what the trainer computes: log-probs of the probe "
            f"tokens differ by {gap:.3g} on average (allowed {probe.tolerance:g}); its weights are not those that "
            "were sent, or its model differs"
        )


def _probe_log_probs(url: str, probe: Probe) -> list[float]:
    """Ask for each token as the one generated next: engines divide only those logits by the temperature."""
    tokens = list(probe.tokens)
    body = {
        "input_ids": [tokens[:end] for end in range(1, len(tokens))],
        "sampling_params": {"temperature": probe.temperature, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [[token] for token in tokens[1:]],
        **({} if probe.adapter is None else {"lora_path": probe.adapter}),
    }
    replies = post_json(f"{url}/generate", body, timeout=_PROBE_TIMEOUT_S)
    return [reply["meta_info"]["output_token_ids_logprobs"][0][0][0] for reply in replies]
