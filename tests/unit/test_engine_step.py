"""The tokens of a step as flat arrays, and the fixed-size forwards of deterministic mode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime.engine.kv_cache import KVCache, LayerShape
from slime.engine.models.attention import plan_attention
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams
from slime.engine.scheduler.step import (
    FIXED_ROWS,
    LAST_SAMPLED,
    Step,
    StepBatch,
    TokenSpan,
    make_batch,
    split_fixed,
)

PADDING_ROW = 9


def make_request(row: int, length: int, **options: int) -> Request:
    return Request(
        rid=str(row),
        token_ids=[100 * row + i for i in range(length)],
        prompt_len=length,
        params=SamplingParams(),
        seed=0,
        row=row,
        **options,
    )


@pytest.fixture
def step() -> Step:
    """A decoding request in row 1, the newest token and two drafts in row 2, 40 prompt tokens in row 3."""
    decoding, drafting = make_request(1, 6), make_request(2, 5)
    prompt = make_request(3, 40, logprob_start_len=37)
    return Step(
        decoding=[decoding],
        rows=np.array([1]),
        positions=np.array([5]),
        prefill=[TokenSpan(request=prompt, start=0, count=40, samples=True)],
        drafts=[TokenSpan(request=drafting, start=4, count=3, samples=True, draft=[7, 8])],
    )


def test_a_step_is_one_flat_batch(step: Step):
    batch = make_batch(step)
    assert batch.ids.tolist() == [LAST_SAMPLED, 204, 7, 8, *range(300, 340)]
    assert batch.positions.tolist() == [5, 4, 5, 6, *range(40)]
    assert batch.rows.tolist() == [1, 2, 2, 2] + [3] * 40
    assert batch.counts == [1, 3, 40]
    assert [r.rid for r in batch.sampled] == ["1", "2", "2", "2", "3"]
    assert batch.sampled_at.tolist() == [0, 1, 2, 3, 43]
    # positions 37 and 38 of the prompt give the log-probs of its tokens 38 and 39
    assert [r.rid for r in batch.scored] == ["3", "3"]
    assert batch.scored_at.tolist() == [4 + 37, 4 + 38]


def test_deterministic_forwards_have_one_size_and_lose_nothing(step: Step):
    batch = make_batch(step)
    parts = list(split_fixed(batch, PADDING_ROW))
    assert len(parts) == 2
    for name in ("ids", "positions", "rows"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert joined.shape == (2 * FIXED_ROWS,)
        assert joined[:44].tolist() == getattr(batch, name).tolist()
        assert set(joined[44:].tolist()) == {PADDING_ROW if name == "rows" else 0}
    assert all(part.counts == [1] * FIXED_ROWS for part in parts)
    for requests, places in (("sampled", "sampled_at"), ("scored", "scored_at")):
        found = [
            (request, first + int(at))
            for first, part in zip((0, FIXED_ROWS), parts, strict=True)
            for request, at in zip(getattr(part, requests), getattr(part, places), strict=True)
        ]
        expected = zip(getattr(batch, requests), getattr(batch, places).tolist(), strict=True)
        assert found == list(expected)


def test_the_shape_of_a_tokens_attention_follows_from_its_position_alone():
    table = np.arange(1, 1 + 4 * 30, dtype=np.int32).reshape(4, 30)
    layers = {0: LayerShape(num_heads=1, key_dim=2, value_dim=2)}
    cache = KVCache(layers, 120, 4, torch.float32, torch.device("cpu"))
    positions = np.array([0, 3, 4, 8, 15, 16, 24, 47, 48, 119], np.int32)
    count = len(positions)
    batch = StepBatch(
        ids=np.zeros(count, np.int32),
        positions=positions,
        rows=np.zeros(count, np.int32) + 2,
        counts=[1] * count,
        sampled=[],
        sampled_at=np.zeros(0, np.int64),
        scored=[],
        scored_at=np.zeros(0, np.int64),
    )
    plan = plan_attention(batch, table, cache)
    pages = {
        int(position): group.kv_len // 4
        for group in plan.groups
        for position in group.positions.flatten()
    }
    assert pages == {0: 1, 3: 1, 4: 2, 8: 3, 15: 4, 16: 6, 24: 8, 47: 12, 48: 16, 119: 30}
    assert plan.slots.tolist() == [4 * table[2, p // 4] + p % 4 for p in positions.tolist()]
