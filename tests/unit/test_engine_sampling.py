"""Sampling against naive versions: frequencies, filters, penalties, independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling import sample, uniforms
from slime.engine.scheduler.sampling_params import RequestError, parse_sampling_params

VOCAB = 12


def make_request(
    seed: int = 0, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params
) -> Request:
    return Request(
        rid="r",
        token_ids=[*prompt, *output],
        prompt_len=len(prompt),
        params=parse_sampling_params(params),
        seed=seed,
        eos_ids=frozenset({0}),
    )


def make_logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def sample_many(logits: torch.Tensor, count: int = 4000, **params) -> np.ndarray:
    """Relative frequency of each token over many seeds."""
    requests = [make_request(seed, **params) for seed in range(count)]
    tokens = sample(logits.expand(count, -1), requests).tokens
    return np.bincount(tokens, minlength=VOCAB) / count


def test_greedy_takes_the_most_probable_and_reports_its_log_prob_at_temperature_one():
    logits = make_logits(3)
    sampled = sample(logits, [make_request(temperature=0.0) for _ in range(3)])
    expected = logits.log_softmax(-1).max(-1)
    assert sampled.tokens == expected.indices.tolist()
    assert sampled.log_probs == pytest.approx(expected.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 1e-320])
def test_hardly_any_temperature_is_greedy_and_not_a_division_by_zero(temperature: float):
    logits = make_logits(2)
    sampled = sample(logits, [make_request(temperature=temperature) for _ in range(2)])
    expected = logits.log_softmax(-1).max(-1)
    assert sampled.tokens == expected.indices.tolist()
    assert sampled.log_probs == pytest.approx(expected.values.tolist(), abs=1e-6)


def test_a_huge_temperature_samples_evenly_from_the_allowed_tokens():
    sampled = sample(make_logits(), [make_request(temperature=1e300, min_new_tokens=1)])
    assert sampled.log_probs == pytest.approx([-math.log(VOCAB)], abs=1e-6)
    assert sampled.tokens != [0]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_frequencies_follow_the_scaled_distribution(temperature: float):
    logits = make_logits()
    expected = (logits[0] / temperature).softmax(-1).numpy()
    found = sample_many(logits, temperature=temperature)
    # five standard deviations of a binomial share
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-9)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05}],
)
def test_filters_keep_exactly_the_tokens_a_loop_keeps(params: dict):
    logits = make_logits()
    probs = logits[0].softmax(-1).tolist()
    order = sorted(range(VOCAB), key=lambda t: -probs[t])
    kept, before = set(), 0.0
    for rank, token in enumerate(order):
        in_k = rank < params.get("top_k", VOCAB)
        in_p = before <= params.get("top_p", 1.0)
        in_min = probs[token] >= max(probs) * params.get("min_p", 0.0)
        if in_k and in_p and in_min:
            kept.add(token)
        before += probs[token]
    found = sample_many(logits, **params)
    assert {t for t in range(VOCAB) if found[t] > 0} == kept
    total = sum(probs[t] for t in kept)
    for token in kept:
        share = probs[token] / total
        assert abs(found[token] - share) < 5 * math.sqrt(share * (1 - share) / 4000) + 1e-9


def test_log_probs_are_of_the_temperature_alone_whatever_the_filters():
    logits = make_logits(2)
    requests = [
        make_request(5, temperature=0.7, top_k=2),
        make_request(6, temperature=1.3, top_p=0.5, frequency_penalty=1.0),
    ]
    sampled = sample(logits, requests)
    for row, temperature in enumerate((0.7, 1.3)):
        expected = (logits[row] / temperature).log_softmax(-1)[sampled.tokens[row]].item()
        assert sampled.log_probs[row] == pytest.approx(expected, abs=1e-6)


def test_a_row_samples_the_same_token_alone_and_among_others():
    logits = make_logits(6)
    requests = [
        make_request(
            seed,
            temperature=[0.0, 1.0, 0.8, 1.0, 1.0, 2.0][seed],
            top_k=[-1, 3, -1, 1, -1, 4][seed],
        )
        for seed in range(6)
    ]
    together = sample(logits, requests)
    for row in range(6):
        alone = sample(logits[row : row + 1], [requests[row]])
        assert alone.tokens == together.tokens[row : row + 1]
        assert alone.log_probs == together.log_probs[row : row + 1]


def test_the_stream_depends_on_seed_and_position_and_covers_the_unit_interval():
    seeds = np.arange(1000, dtype=np.uint64)
    grid = np.stack([uniforms(seeds, np.full(1000, position, np.uint64)) for position in range(50)])
    assert len(np.unique(grid)) == grid.size
    assert grid.min() >= 0 and grid.max() < 1
    counts, _ = np.histogram(grid, bins=20, range=(0, 1))
    assert np.all(np.abs(counts - 2500) < 5 * math.sqrt(2500))
    correlation = np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(grid.size)


def test_penalties_and_bias_change_the_choice_as_their_formulas_say():
    logits = make_logits()
    output = (3, 3, 5)
    request = make_request(
        output=output,
        temperature=0.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={"7": 1.5},
        repetition_penalty=1.2,
    )
    shaped = logits[0].tolist()
    for token in {1, 2, *output}:
        shaped[token] = shaped[token] / 1.2 if shaped[token] > 0 else shaped[token] * 1.2
    for token in set(output):
        shaped[token] -= 0.5 * output.count(token) + 0.25
    shaped[7] += 1.5
    assert sample(logits, [request]).tokens == [max(range(VOCAB), key=shaped.__getitem__)]


def test_a_bias_for_every_token_does_not_hold_up_the_step():
    """Added one by one, each of its entries is an operation of its own: seconds per step."""
    bias = {str(token): -1.0 for token in range(100_000)} | {"70000": 9.0}
    logits = torch.zeros(1, 100_000)
    request = make_request(temperature=0.0, logit_bias=bias)
    with torch.profiler.profile() as profile:
        assert sample(logits, [request]).tokens == [70_000]
    assert sum(event.count for event in profile.key_averages()) < 1000


def test_end_tokens_wait_for_min_new_tokens():
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 0], logits[0, 4], logits[0, 9] = 9.0, 8.0, 7.0
    held = make_request(temperature=0.0, min_new_tokens=2, stop_token_ids=[4], output=(9,))
    free = make_request(temperature=0.0, min_new_tokens=2, stop_token_ids=[4], output=(9, 9))
    assert sample(logits, [held]).tokens == [9]
    assert sample(logits, [free]).tokens == [0]


def test_unknown_and_unsupported_keys_are_refused_by_name():
    with pytest.raises(
        RequestError, match=r"unknown field `temprature`, expected one of .*`temperature`"
    ) as error:
        parse_sampling_params({"temprature": 1.0})
    assert error.value.plain
    with pytest.raises(RequestError, match="`ebnf` is not supported"):
        parse_sampling_params({"ebnf": "{}"})
    assert parse_sampling_params({"ebnf": None}).temperature == 1.0


def test_deeply_nested_values_are_refused():
    deep: list = []
    for _ in range(1020):  # orjson parses up to 1024 levels; `repr` of as many is a RecursionError
        deep = [deep]
    with pytest.raises(RequestError, match="`stop` must be a non-empty string"):
        parse_sampling_params({"stop": deep})


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 0},
        {"min_p": 2},
        {"max_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 3},
        {"stop": 3},
        {"temperature": "hot"},
        {"n": 0},
        {"n": 1 << 40},  # would be made one by one
        {"logit_bias": {"3": 1e308}},  # infinite in 32 bits
        {"ignore_eos": 1},
        {"json_schema": {}},
        {"json_schema": "{}", "regex": "a"},
        {"json_schema": "{}", "ignore_eos": True},
        {"regex": "a", "min_new_tokens": 1},
        {"regex": "a" * 5000},
    ],
)
def test_values_out_of_range_are_refused(params: dict):
    with pytest.raises(RequestError, match=next(iter(params))):
        parse_sampling_params(params)
