"""Deterministic mode: a request's tokens and log-probs are bit for bit the same in any company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.engines import local_engine
from tests.tiny import make_tiny_checkpoint

SIZES = {
    "qwen3": {},
    "qwen3_moe": {},
    # nothing here divides evenly into vector registers
    "llama": {
        "hidden_size": 60,
        "intermediate_size": 130,
        "head_dim": 22,
        "num_key_value_heads": 1,
        "vocab_size": 333,
    },
}
PARAMS = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 32, "ignore_eos": True}


@pytest.fixture(scope="module", params=SIZES)
def checkpoint(request, tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("m"), request.param, **SIZES[request.param])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    rows = [[rng.randrange(256) for _ in range(rng.randint(3, 90))] for _ in range(7)]
    return [*rows, rows[0][:2] + rows[1], rows[2] + [5, 6], rows[3]]


def outcome(requests) -> list[tuple[list[int], list[float]]]:
    return [(r.output_ids, r.output_log_probs) for r in requests]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, prompts) -> list[tuple[list[int], list[float]]]:
    """Each request on its own, with nothing cached."""
    with local_engine(
        checkpoint, enable_deterministic_inference=True, disable_radix_cache=True
    ) as engine:
        return [
            outcome(engine.generate([p], seeds=[i], **PARAMS))[0] for i, p in enumerate(prompts)
        ]


@pytest.mark.parametrize(
    "options",
    [{}, {"chunked_prefill_size": 13}, {"max_total_tokens": 208}],
    ids=["crowd", "chunks", "retraction"],
)
def test_company_chunks_and_retraction_change_no_bit(
    checkpoint: Path, prompts, alone, options: dict
):
    seeds = list(range(len(prompts)))
    with local_engine(checkpoint, enable_deterministic_inference=True, **options) as engine:
        requests = engine.generate(prompts, seeds=seeds, **PARAMS)
    assert outcome(requests) == alone
    if "max_total_tokens" in options:
        assert sum(r.num_retractions for r in requests) > 0


def test_prefix_hits_change_no_bit(checkpoint: Path, prompts, alone):
    with local_engine(checkpoint, enable_deterministic_inference=True) as engine:
        # Cached pages that were decoded, not only prefilled, are hit as well.
        warm = [p[: len(p) // 2] for p in prompts]
        engine.generate(warm, **PARAMS)
        engine.generate(prompts[::-1], **PARAMS)
        requests = engine.generate(prompts, seeds=list(range(len(prompts))), **PARAMS)
    assert sum(r.num_cached for r in requests) > 150
    assert outcome(requests) == alone


def test_rows_of_a_product_do_not_depend_on_their_place():
    """What the mode rests on: products with 32 rows give a row the same bits wherever it stands."""
    generator = torch.Generator().manual_seed(0)
    for width, height in [(64, 128), (256, 768), (60, 130), (768, 256)]:
        weight = torch.randn(
            width, height, generator=generator
        ).t()  # by columns, as the engine has it
        rows = torch.randn(32, width, generator=generator)
        order = torch.randperm(32, generator=generator)
        assert torch.equal(
            torch.nn.functional.linear(rows, weight)[order],
            torch.nn.functional.linear(rows[order], weight),
        )
