"""Speculative decoding against decoding one by one: same tokens, fewer steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from slime.engine.scheduler.request import Request
from tests.engines import engine_server, local_engine
from tests.tiny import make_tiny_checkpoint

# A forward of Hugging Face's modules, and the engine's own.
FORWARDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"enable_return_routed_experts": True},
}
NGRAM = {"speculative_algorithm": "NGRAM"}
LOADS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True},
    {"temperature": 0.3, "max_new_tokens": 50},
    {"temperature": 0.3, "top_p": 0.9, "top_k": 40, "max_new_tokens": 30, "ignore_eos": True},
    {"temperature": 0.3, "max_new_tokens": 20, "repetition_penalty": 1.2},
    {"temperature": 0, "max_new_tokens": 0},
    {"temperature": 0, "max_new_tokens": 1},
]


@pytest.fixture(scope="module", params=FORWARDS)
def model(request, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Of small weights, so that it repeats itself."""
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("m"), request.param, weight_scale=3.0)
    return path, FORWARDS[request.param]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    rows = [[rng.randrange(256) for _ in range(rng.randint(2, 40))] for _ in range(5)]
    return [*rows, rows[0] * 3, [5, 6, 7] * 9]


def outcome(requests: list[Request]) -> list[tuple[list[int], str, list[float]]]:
    return [(r.output_ids, r.finish.kind if r.finish else "", r.output_log_probs) for r in requests]


def run_loads(path: Path, prompts: list[list[int]], **options: Any):
    with local_engine(path, **options) as engine:
        requests = [engine.generate(prompts, **load) for load in LOADS]
        engine.engine.call(lambda: None).result()
        pool = engine.engine.scheduler.pool
        held = pool.num_pages - pool.num_available
        return [outcome(rows) for rows in requests], engine.engine.num_steps, held, requests


@pytest.mark.parametrize(
    "limits", [{}, {"max_total_tokens": 208, "chunked_prefill_size": 16}], ids=["roomy", "tight"]
)
def test_tokens_are_those_of_decoding_one_by_one(model, prompts, limits: dict[str, Any]):
    path, options = model
    plain, plain_steps, _, _ = run_loads(path, prompts, **options)
    drafted, steps, held, requests = run_loads(path, prompts, **options, **limits, **NGRAM)
    for one, other in zip(plain, drafted, strict=True):
        for (tokens, end, values), (tokens2, end2, values2) in zip(one, other, strict=True):
            assert (tokens2, end2) == (tokens, end)
            assert values2 == pytest.approx(values, abs=1e-4)
    assert held == 0
    if limits:
        assert any(r.num_retractions for rows in requests for r in rows)
    else:
        assert steps < plain_steps
        greedy = [r.draft_history.num_correct for r in requests[0] if r.draft_history]
        assert sum(greedy) > 0.2 * sum(r.num_output for r in requests[0])


def test_deterministic_mode_gives_the_same_bits(model, prompts):
    path, options = model
    fixed = {**options, "enable_deterministic_inference": True}
    assert run_loads(path, prompts, **fixed)[0] == run_loads(path, prompts, **fixed, **NGRAM)[0]


def test_the_reply_has_draft_token_statistics_and_stops_at_stop_tokens(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path, weight_scale=3.0)
    body: dict[str, Any] = {"input_ids": [5, 6, 7] * 9, "return_logprob": True}
    params = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    with engine_server(path, "--device", "cpu") as server:
        plain = server.post("/generate", {**body, "sampling_params": params})
    window = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
    with engine_server(path, "--device", "cpu", *window) as server:
        whole = server.post("/generate", {**body, "sampling_params": params})
        stop = {**params, "stop_token_ids": [plain["output_ids"][20]]}
        stopped = server.post("/generate", {**body, "sampling_params": stop})
    assert whole["output_ids"] == plain["output_ids"]
    meta = whole["meta_info"]
    assert not any(key.startswith("spec") for key in plain["meta_info"])
    assert 1 + meta["spec_verify_ct"] + meta["spec_num_correct_drafts"] == 48
    rate = meta["spec_num_correct_drafts"] / meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_rate"] == pytest.approx(rate) and 0.3 < rate <= 1
    assert meta["spec_accept_length"] == pytest.approx(48 / meta["spec_verify_ct"])
    first = plain["output_ids"].index(stop["stop_token_ids"][0])
    assert stopped["output_ids"] == plain["output_ids"][: first + 1]
    assert len(stopped["meta_info"]["output_token_logprobs"]) == first + 1
