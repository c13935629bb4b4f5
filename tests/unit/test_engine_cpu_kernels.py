"""The compiled CPU kernels against naive versions over random shapes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from slime.engine.kernels.cpu_kernels import SOURCE, CpuKernels
from slime.engine.kernels.interface import (
    Heads,
    LoraWeights,
    Pages,
    QueryKeyNorm,
    Rotary,
    SamplingState,
    Tokens,
)
from slime.engine.kernels.lora import group_rows
from slime.engine.scheduler.sampling import uniforms
from slime.utils.compiled import load_library


@pytest.fixture(scope="module")
def kernels():
    """With two threads, however many the other tests have: their loops are divided."""
    library = load_library(SOURCE)
    if library is None:
        pytest.skip("no gcc here")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield CpuKernels(library)
    torch.set_num_threads(num_threads)


class Case:
    """Tokens of several requests whose pages lie in any order."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        key_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 5])
        self.heads = Heads(
            num_query=key_heads * group, num_key=key_heads, dim=rng.choice([6, 16, 32])
        )
        self.window = rng.choice([None, rng.randint(1, 60)])
        page_size = rng.choice([1, 4, 16])
        num_rows, width = 4, -(-90 // page_size)
        table = torch.randperm(num_rows * width).view(num_rows, width) + 1
        shape = (num_rows * width + 1, page_size, key_heads, self.heads.dim)
        self.pages = Pages(
            keys=torch.randn(shape), values=torch.randn(shape), table=table.to(torch.int32)
        )
        count = rng.choice([3, 40])  # few tokens are shared out by heads
        self.places = [(rng.randrange(num_rows), rng.randrange(90)) for _ in range(count)]
        self.tokens = Tokens(
            ids=torch.zeros(count, dtype=torch.int32),
            rows=torch.tensor([row for row, _ in self.places], dtype=torch.int32),
            positions=torch.tensor([position for _, position in self.places], dtype=torch.int32),
        )
        self.qkv = torch.randn(count, self.heads.width)

    def slot(self, row: int, position: int) -> tuple[int, int]:
        size = self.pages.page_size
        return int(self.pages.table[row, position // size]), position % size


@pytest.mark.parametrize("seed", range(12))
def test_attention(kernels: CpuKernels, seed: int):
    case = Case(seed)
    heads, pages = case.heads, case.pages
    found = kernels.attend(case.qkv, case.tokens, heads, pages, 0.3, case.window)
    for i, (row, position) in enumerate(case.places):
        first = 0 if case.window is None else max(0, position - case.window + 1)
        slots = [case.slot(row, p) for p in range(first, position + 1)]
        keys = torch.stack([pages.keys[s] for s in slots], 1)  # [H, L, D]
        values = torch.stack([pages.values[s] for s in slots], 1)
        query = case.qkv[i, : heads.num_query * heads.dim].view(heads.num_key, -1, heads.dim)
        expected = (query @ keys.transpose(1, 2) * 0.3).softmax(-1) @ values
        torch.testing.assert_close(found[i], expected.reshape(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("with_norm", [True, False])
def test_rotation_and_cache_write(kernels: CpuKernels, seed: int, with_norm: bool):
    case = Case(seed)
    heads, dim = case.heads, case.heads.dim
    case.places = list(dict.fromkeys(case.places))  # one token per place
    count = len(case.places)
    case.tokens.rows = torch.tensor([r for r, _ in case.places], dtype=torch.int32)
    case.tokens.positions = torch.tensor([p for _, p in case.places], dtype=torch.int32)
    qkv = case.qkv[:count].clone()
    rotary = Rotary(cosines=torch.randn(90, dim), sines=torch.randn(90, dim))
    weights = torch.randn(2, dim)
    norm = QueryKeyNorm(query=weights[0], key=weights[1], eps=1e-6) if with_norm else None
    before = qkv.clone().view(count, -1, dim)
    kernels.rope_store(qkv, case.tokens, heads, case.pages, rotary, norm)
    after = qkv.view(count, -1, dim)
    for i, (row, position) in enumerate(case.places):
        x = before[i, : heads.num_query + heads.num_key]
        if with_norm:
            per_head = weights[[0] * heads.num_query + [1] * heads.num_key]
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * per_head
        rolled = torch.cat([-x[:, dim // 2 :], x[:, : dim // 2]], -1)
        expected = x * rotary.cosines[position] + rolled * rotary.sines[position]
        slot = case.slot(row, position)
        torch.testing.assert_close(after[i, : heads.num_query], expected[: heads.num_query])
        torch.testing.assert_close(case.pages.keys[slot], expected[heads.num_query :])
        assert torch.equal(case.pages.values[slot], before[i, heads.num_query + heads.num_key :])


@pytest.mark.parametrize("size", [7, 64, 300])
def test_norm_and_activation(kernels: CpuKernels, size: int):
    torch.manual_seed(size)
    hidden, delta, weight = torch.randn(60, size), torch.randn(60, size), torch.randn(size)
    total = hidden + delta
    expected = torch.nn.functional.rms_norm(total, (size,), weight, 1e-6)
    torch.testing.assert_close(kernels.add_rms_norm(hidden, delta, weight, 1e-6), expected)
    assert torch.equal(hidden, total)
    torch.testing.assert_close(kernels.add_rms_norm(hidden, None, weight, 1e-6), expected)
    gate_up = torch.randn(60, 2 * size) * 20
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(
        kernels.silu_mul(gate_up), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("vocab", [5, 256, 1000])
def test_sampling(kernels: CpuKernels, vocab: int):
    torch.manual_seed(vocab)
    count = 400
    logits = torch.randn(count, vocab) * 3
    temperatures = torch.full((count,), 0.8)
    temperatures[::3] = -1.0  # the most probable
    settings = SamplingState(
        temperatures=temperatures,
        seeds=torch.arange(count),
        last_tokens=torch.zeros(count, dtype=torch.int32),
    )
    rows = torch.arange(count, dtype=torch.int32)
    positions = torch.full((count,), 9, dtype=torch.int32)
    tokens, log_probs = kernels.sample(logits, rows, positions, settings)
    scaled = logits / temperatures.abs()[:, None]
    numbers = torch.from_numpy(uniforms(np.arange(count), np.full(count, 10)))
    expected = torch.searchsorted(scaled.double().softmax(-1).cumsum(-1), numbers[:, None])[:, 0]
    expected[::3] = logits[::3].argmax(-1)
    # A uniform number may be within rounding of the boundary between two tokens.
    assert (tokens.long() != expected).sum() <= 1
    assert torch.equal(settings.last_tokens, tokens)
    chosen = scaled.log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(log_probs, chosen, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [5, 300])
def test_barred_tokens_are_not_sampled_but_count_in_the_log_probs(kernels: CpuKernels, vocab: int):
    torch.manual_seed(vocab)
    count = 200
    logits = torch.randn(count, vocab) * 3
    logits[:, 0] = 60.0  # would be sampled in every row that does not bar it
    temperatures = torch.full((count,), 0.8)
    temperatures[::3] = -1.0
    settings = SamplingState(
        temperatures=temperatures,
        seeds=torch.arange(count),
        last_tokens=torch.zeros(count, dtype=torch.int32),
    )
    forbidden = np.full((count, 3), -1, np.int32)
    forbidden[::2] = [0, vocab - 1, vocab + 7]  # the last is no token of this model
    rows = torch.arange(count, dtype=torch.int32)
    positions = torch.full((count,), 9, dtype=torch.int32)
    tokens, log_probs = kernels.sample(logits, rows, positions, settings, forbidden)
    scaled = logits / temperatures.abs()[:, None]
    open_ones = scaled.double().clone()
    open_ones[::2, [0, vocab - 1]] = float("-inf")
    numbers = torch.from_numpy(uniforms(np.arange(count), np.full(count, 10)))
    expected = torch.searchsorted(open_ones.softmax(-1).cumsum(-1), numbers[:, None], right=True)
    expected = expected[:, 0]
    expected[::3] = open_ones[::3].argmax(-1)
    assert (tokens.long() != expected).sum() <= 1
    assert not np.isin(tokens[::2].numpy(), [0, vocab - 1]).any()
    assert (tokens[1::2] == 0).all()
    chosen = scaled.double().log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), chosen, atol=1e-4, rtol=1e-5)


def test_rounding_at_the_end_of_a_chunk_samples_no_token_of_probability_0(kernels: CpuKernels):
    """Each small weight is rounded up where it is added to 1, so the sum is more than there is to find."""
    logits = torch.full((1, 256), math.log(6.1e-8))
    logits[0, 0], logits[0, -1] = 0.0, -80.0
    seeds = np.arange(2_000_000, dtype=np.uint64)
    numbers = uniforms(seeds, np.full(len(seeds), 10))
    highest = seeds[np.argsort(numbers)[-50:]].astype(np.int64)  # uniform numbers within 2e-5 of 1
    settings = SamplingState(
        temperatures=torch.ones(50),
        seeds=torch.from_numpy(highest),
        last_tokens=torch.zeros(50, dtype=torch.int32),
    )
    rows = torch.arange(50, dtype=torch.int32)
    positions = torch.full((50,), 9, dtype=torch.int32)
    tokens, _ = kernels.sample(logits.expand(50, -1).contiguous(), rows, positions, settings)
    assert 255 not in tokens.tolist()


@pytest.mark.parametrize("tokens", [1, 7, 32, 33])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("widths", [(24,), (40, 16), (24, 8, 8)])
def test_adapters(kernels: CpuKernels, tokens: int, fixed: bool, widths: tuple[int, ...]):
    """In C for few rows and in torch for many: each row has its own adapter, or none, or all one."""
    rng = random.Random(tokens)
    torch.manual_seed(tokens)
    num_slots, most, depth = 3, 5, 50
    weights = LoraWeights(
        a=torch.randn(num_slots, len(widths) * most, depth),
        b=torch.randn(num_slots, most, sum(widths)).transpose(1, 2),
        widths=widths,
        scales=torch.rand(num_slots) + 0.5,
        ranks=np.array(
            [[rng.randint(0, most) for _ in widths] for _ in range(num_slots)], np.int32
        ),
    )
    x, out = torch.randn(tokens, depth), torch.randn(tokens, sum(widths))
    for slots in ([rng.randrange(-1, num_slots) for _ in range(tokens)], [1] * tokens):
        found, expected = out.clone(), out.clone()
        rows = group_rows(np.array(slots, np.int32), torch.device("cpu"), fixed=fixed)
        if rows is not None:
            kernels.add_lora(found, x, weights, rows)
        for token, slot in enumerate(slots):
            first = 0
            for part, width in enumerate(widths if slot >= 0 else ()):
                rank = weights.ranks[slot, part]
                low = weights.a[slot, part * most : part * most + rank] @ x[token]
                delta = weights.b[slot, first : first + width, :rank] @ low * weights.scales[slot]
                expected[token, first : first + width] += delta
                first += width
            if slot < 0:
                assert torch.equal(found[token], out[token])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
