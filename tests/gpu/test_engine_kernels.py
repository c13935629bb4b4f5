"""The Triton kernels against naive versions over random shapes.

On a GPU, or in Triton's interpreter with TRITON_INTERPRET=1, as tests/integration/test_engine_triton.py does.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.engine.kernels import cuda_kernels, triton_matmuls  # noqa: E402
from slime.engine.kernels.cuda_kernels import CudaKernels  # noqa: E402
from slime.engine.kernels.interface import (  # noqa: E402
    Heads,
    Pages,
    QueryKeyNorm,
    Rotary,
    SamplingState,
    Tokens,
)
from slime.engine.kernels.triton_launch import TileSizes  # noqa: E402
from slime.engine.scheduler.sampling import uniforms  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
SEEDS = range(1 if INTERPRETED else 12)
# Results are rounded once to the dtype: half a unit of its last place, doubled for the sums before.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
KERNELS = CudaKernels()


class Case:
    """Random heads, pages and lengths; every row of the page table has its own pages."""

    def __init__(self, seed: int, dtype: torch.dtype, longest: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        key_heads = rng.choice([1, 2, 3, 8])
        group = rng.choice([1, 2, 4, 7])
        dim = rng.choice([16, 24, 64, 128])
        self.heads = Heads(num_query=key_heads * group, num_key=key_heads, dim=dim)
        self.window = rng.choice([None, rng.randint(1, longest)])
        self.scale = dim**-0.5
        self.dtype = dtype
        page_size = rng.choice([1, 4, 16, 64])
        num_rows, width = rng.randint(2, 6), -(-longest // page_size)
        table = torch.randperm(num_rows * width).view(num_rows, width) + 1
        shape = (num_rows * width + 1, page_size, key_heads, dim)
        self.pages = Pages(
            keys=torch.randn(shape, device=DEVICE).to(dtype),
            values=torch.randn(shape, device=DEVICE).to(dtype),
            table=table.to(DEVICE, torch.int32),
        )
        self.lens = [rng.randint(1, longest) for _ in range(num_rows)]

    def qkv(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, self.heads.width, device=DEVICE).to(self.dtype)

    def slot(self, row: int, position: int) -> tuple[int, int]:
        size = self.pages.page_size
        return int(self.pages.table[row, position // size]), position % size

    def naive(self, qkv: torch.Tensor, row: int, position: int) -> torch.Tensor:
        """Attention of one token in fp32, position by position."""
        heads, dim = self.heads, self.heads.dim
        query = qkv[: heads.num_query * dim].float().view(heads.num_key, -1, dim)
        first = 0 if self.window is None else max(0, position - self.window + 1)
        slots = [self.slot(row, p) for p in range(first, position + 1)]
        keys = torch.stack([self.pages.keys[s].float() for s in slots], 1)  # [H, L, D]
        values = torch.stack([self.pages.values[s].float() for s in slots], 1)
        weights = (query @ keys.transpose(1, 2) * self.scale).softmax(-1)
        return (weights @ values).reshape(-1)


def tokens(positions: list[int], rows: list[int], tiles: list[tuple[int, int]] | None) -> Tokens:
    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return Tokens(
        ids=ints([0] * len(rows)),
        positions=ints(positions),
        rows=ints(rows),
        tiles=None if tiles is None else ints(tiles),
    )


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("programs", [1, 100000], ids=["whole", "split"])
def test_decode_attention(seed: int, dtype: torch.dtype, programs: int, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "_PROGRAMS", programs)  # how finely requests are split
    case = Case(seed, dtype, longest=60 if INTERPRETED else 700)
    rows = list(range(len(case.lens)))[::-1]
    positions = [case.lens[row] - 1 for row in rows]
    qkv = case.qkv(len(rows))
    found = KERNELS.attend(
        qkv, tokens(positions, rows, None), case.heads, case.pages, case.scale, case.window
    )
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        assert_close(found[i], case.naive(qkv[i], row, position), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_prompt_attention_after_a_cached_prefix(seed: int, dtype: torch.dtype):
    case = Case(seed, dtype, longest=60 if INTERPRETED else 300)
    positions: list[int] = []
    rows: list[int] = []
    tiles: list[tuple[int, int]] = []
    for row, length in enumerate(case.lens):
        start = random.Random(seed + row).randrange(length)
        piece = list(range(start, length))
        tiles += [
            (len(rows) + i, min(cuda_kernels.TILE, len(piece) - i))
            for i in range(0, len(piece), cuda_kernels.TILE)
        ]
        positions += piece
        rows += [row] * len(piece)
    qkv = case.qkv(len(rows))
    found = KERNELS.attend(
        qkv, tokens(positions, rows, tiles), case.heads, case.pages, case.scale, case.window
    )
    for i in random.Random(seed).sample(range(len(rows)), min(20, len(rows))):
        assert_close(found[i], case.naive(qkv[i], rows[i], positions[i]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("with_angles", [False, True])
def test_rotation_and_cache_write(
    seed: int, dtype: torch.dtype, with_norm: bool, with_angles: bool
):
    """With angles, as behind images, a token is rotated by another row than that of its position."""
    case = Case(seed, dtype, longest=90)
    heads, dim = case.heads, case.heads.dim
    rotary = Rotary(
        cosines=torch.randn(90, dim, device=DEVICE).to(dtype),
        sines=torch.randn(90, dim, device=DEVICE).to(dtype),
    )
    weights = torch.randn(2, dim, device=DEVICE).to(dtype)
    norm = QueryKeyNorm(query=weights[0], key=weights[1], eps=1e-6) if with_norm else None
    rows = list(range(len(case.lens)))
    positions = [length - 1 for length in case.lens]
    qkv = case.qkv(len(rows))
    before = qkv.float().clone().view(len(rows), -1, dim)
    given, angles = tokens(positions, rows, None), positions
    if with_angles:
        angles = [position // 2 for position in positions]
        given.angles = torch.tensor(angles, dtype=torch.int32, device=DEVICE)
    KERNELS.rope_store(qkv, given, heads, case.pages, rotary, norm)
    after = qkv.view(len(rows), -1, dim)
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        slot = case.slot(row, position)
        for head in range(heads.num_query + heads.num_key):
            x = before[i, head]
            is_query = head < heads.num_query
            if with_norm:
                x = x / (x.square().mean() + 1e-6).sqrt() * weights[0 if is_query else 1].float()
            rolled = torch.cat([-x[dim // 2 :], x[: dim // 2]])
            cosine, sine = rotary.cosines[angles[i]], rotary.sines[angles[i]]
            expected = x * cosine.float() + rolled * sine
            found = after[i, head] if is_query else case.pages.keys[slot][head - heads.num_query]
            assert (found.float() - expected).norm() <= TOLERANCE[dtype] * expected.norm() + 1e-6
        values = before[i, heads.num_query + heads.num_key :]
        assert torch.equal(case.pages.values[slot].float(), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [60, 256, 1024])
def test_norm_and_activation(dtype: torch.dtype, size: int):
    hidden, delta = torch.randn(2, 5, size, device=DEVICE).to(dtype)
    weight = torch.randn(size, device=DEVICE).to(dtype)
    total = hidden + delta
    expected = total.float() / (total.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    found = KERNELS.add_rms_norm(hidden, delta, weight, 1e-6)
    assert torch.equal(hidden, total)
    assert_close(found, expected * weight.float(), dtype)
    parts = torch.randn(3, 5, size, device=DEVICE)
    total = hidden.float() + parts.sum(0)
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    found = KERNELS.add_rms_norm(hidden, parts, weight, 1e-6)
    assert_close(hidden, total, dtype)
    assert_close(found, expected * weight.float(), dtype)
    gate_up = torch.randn(5, 2 * size, device=DEVICE).to(dtype)
    gate, up = gate_up.float().chunk(2, -1)
    assert_close(KERNELS.silu_mul(gate_up), torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else DTYPES)
@pytest.mark.parametrize("seed", range(2 if INTERPRETED else 20))
def test_matmuls_of_few_rows(seed: int, dtype: torch.dtype):
    """Against fp32 matmuls of the same numbers; parts are added up by the norm that follows."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = rng.choice([1, 5, 16, 33] if INTERPRETED else [1, 8, 16, 40, 64, 100, 128, 256])
    depth = rng.choice([64, 128, 192] if INTERPRETED else [64, 576, 1024, 2560, 3072])
    columns = rng.choice([32, 48, 200] if INTERPRETED else [40, 1024, 2560, 6144])
    x = torch.randn(rows, depth, device=DEVICE).to(dtype)
    weight = (torch.randn(columns, depth, device=DEVICE) * depth**-0.5).to(dtype)
    expected = x.float() @ weight.float().T
    assert_close(KERNELS.linear(x, weight, None), expected, dtype)
    parts = KERNELS.linear_split_k(x, weight, None)
    assert_close(parts.float().view(-1, rows, columns).sum(0), expected, dtype)
    gate, up = expected.chunk(2, -1)
    active = torch.nn.functional.silu(gate) * up
    found = KERNELS.gated_linear(x, weight, None)
    scale = active.abs().max()
    torch.testing.assert_close(found.float() / scale, active / scale, atol=TOLERANCE[dtype], rtol=0)
    bias = torch.randn(columns, device=DEVICE).to(dtype)
    assert_close(KERNELS.linear(x, weight, bias), expected + bias.float(), dtype)
    hidden = torch.randn(rows, columns, device=DEVICE).to(dtype)
    total = hidden.float() + parts.float().view(-1, rows, columns).sum(0)
    normed = KERNELS.add_rms_norm(hidden, parts, torch.ones_like(hidden[0]), 1e-6)
    assert_close(hidden, total, dtype)
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(normed, expected, dtype)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_matmuls_in_every_tile_size(splits: int, gated: bool):
    """Rows and columns that fill no block, and split-K."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    x = torch.randn(21, 512, device=DEVICE).to(dtype)
    weight = (torch.randn(80, 512, device=DEVICE) * 512**-0.5).to(dtype)
    expected = x.float() @ weight.float().T
    if gated and splits == 1:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    for rows, columns in ((16, 16), (32, 64), (64, 32)):
        tiles = TileSizes(BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=64, num_warps=4, num_stages=2)
        found = triton_matmuls.matmul(x, weight, tiles, splits=splits, gated=gated and splits == 1)
        assert_close(found.float().sum(0), expected, dtype)


def settings(count: int, temperature: float, seed: int = 0) -> SamplingState:
    return SamplingState(
        temperatures=torch.full((count,), temperature, device=DEVICE),
        seeds=torch.arange(seed, seed + count, device=DEVICE),
        last_tokens=torch.zeros(count, dtype=torch.int32, device=DEVICE),
    )


def sample_rows(logits: torch.Tensor, given: SamplingState, position: int = 5):
    rows = torch.arange(len(logits), dtype=torch.int32, device=DEVICE)
    return KERNELS.sample(logits, rows, torch.full_like(rows, position), given)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_samples_follow_the_distribution(temperature: float):
    count, vocab = (200, 5) if INTERPRETED else (20000, 12)
    logits = (torch.randn(1, vocab, device=DEVICE) * 2).expand(count, -1).contiguous()
    given = settings(count, temperature)
    found, log_probs = sample_rows(logits, given)
    expected = (logits[0] / temperature).softmax(-1)
    shares = torch.bincount(found.long(), minlength=vocab) / count
    bound = 5 * (expected * (1 - expected) / count).sqrt() + 1e-9  # five standard deviations
    assert ((shares - expected).abs() < bound).all()
    torch.testing.assert_close(log_probs, expected.log()[found.long()], atol=1e-5, rtol=1e-5)
    assert torch.equal(given.last_tokens, found)


def test_samples_are_those_of_the_cumulative_distribution():
    """The same uniform number as on a CPU, looked up in fp64."""
    count, vocab = (20, 3000) if INTERPRETED else (500, 151936)
    logits = torch.randn(count, vocab, device=DEVICE) * 3
    found, _ = sample_rows(logits, settings(count, 0.8, seed=2**40))
    numbers = uniforms(np.arange(2**40, 2**40 + count), np.full(count, 6))
    total = (logits.double() / 0.8).softmax(-1).cumsum(-1)
    expected = torch.searchsorted(total, torch.from_numpy(numbers).to(DEVICE)[:, None])[:, 0]
    # A uniform number may be within rounding of the boundary between two tokens.
    assert (found.long() != expected).sum() <= count // 100


def test_rare_tokens_are_sampled_as_often_as_they_should():
    """A token of probability 1e-3 among many, which a coarse uniform number would distort."""
    if INTERPRETED:
        pytest.skip("too many samples for the interpreter")
    count, vocab = 200000, 2000
    logits = torch.zeros(1, vocab, device=DEVICE).expand(count, -1).contiguous()
    found, _ = sample_rows(logits.to(torch.bfloat16), settings(count, 1.0))
    counts = torch.bincount(found.long(), minlength=vocab).float()
    mean = count / vocab
    assert (counts.var() / mean - 1).abs() < 0.2  # Poisson: the variance is the mean


def test_greedy_sampling_and_independence_of_other_rows():
    vocab = 3000
    logits = torch.randn(6, vocab, device=DEVICE)
    found, log_probs = sample_rows(logits, settings(6, -1.0))
    expected = logits.log_softmax(-1).max(-1)
    assert torch.equal(found.long(), expected.indices)
    torch.testing.assert_close(log_probs, expected.values, atol=1e-5, rtol=1e-5)
    together, _ = sample_rows(logits, settings(6, 0.8))
    alone, _ = sample_rows(logits[3:4], settings(1, 0.8, seed=3))
    assert together[3] == alone[0]
    other, _ = sample_rows(logits.expand(6, -1), settings(6, 5.0), position=6)
    assert not torch.equal(other, sample_rows(logits, settings(6, 5.0), position=7)[0])


@pytest.fixture
def argmax_as_on_a_gpu(monkeypatch):
    """Let the interpreter compute argmax as compiled kernels do, not by numpy, for which NaN is the largest.

    There each pair is compared by `left > right or left == right`, which is False with NaN: the right one wins.
    """
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import ReduceOps

    original = ReduceOps.min_max

    def argmax(values: np.ndarray, axis: int, keepdims: bool) -> np.ndarray:
        assert values.ndim == 1 and not keepdims
        best = 0
        for i in range(1, len(values)):
            best = best if values[best] >= values[i] else i
        return np.array(best)

    def min_max(self, given, val_reduce_op, idx_reduce_op=None):
        return original(self, given, val_reduce_op, argmax if idx_reduce_op else None)

    monkeypatch.setattr(ReduceOps, "min_max", min_max)


@pytest.mark.parametrize("temperature", [-1.0, 0.8])
@pytest.mark.usefixtures("argmax_as_on_a_gpu")
@pytest.mark.parametrize("vocab", [60, 3000])  # neither is a multiple of the kernel's block
def test_nan_logits_give_a_token_of_the_vocabulary_and_a_nan_log_prob(
    vocab: int, temperature: float
):
    logits = torch.randn(6, vocab, device=DEVICE)
    logits[5, : vocab // 2] = -float("inf")
    expected, expected_log_probs = sample_rows(logits, settings(6, temperature))
    logits[0] = float("nan")
    logits[1, 7] = float("nan")
    logits[2, -1] = float("nan")
    logits[3, vocab // 1024 * 1024 :] = float("nan")  # the last block
    state = settings(6, temperature)
    found, log_probs = sample_rows(logits, state)
    assert ((found >= 0) & (found < vocab)).all()
    assert torch.equal(state.last_tokens, found)
    assert log_probs[:4].isnan().all()
    assert torch.equal(found[4:], expected[4:])
    assert torch.equal(log_probs[4:], expected_log_probs[4:])


def test_matmuls_where_there_is_little_shared_memory(monkeypatch):
    x, weight = torch.zeros(2, 8, 1024, device=DEVICE, dtype=torch.float16)
    monkeypatch.setattr(triton_matmuls, "shared_memory", lambda: 99 << 10)
    tiles = triton_matmuls.choose_tiles(x, weight, gated=True)
    assert tiles is not None and tiles.num_stages == 3
    monkeypatch.setattr(triton_matmuls, "shared_memory", lambda: 48 << 10)
    assert triton_matmuls.choose_tiles(x, weight, gated=True) is None


def test_matmuls_that_are_left_to_the_library():
    def blocks_for(rows: int, columns: int, depth: int, dtype: torch.dtype, **how: int):
        shapes = ((rows, depth), (columns, depth))
        x, weight = (torch.empty(shape, device=DEVICE, dtype=dtype) for shape in shapes)
        return triton_matmuls.choose_tiles(x, weight, **how)

    half = torch.float16
    assert blocks_for(64, 4096, 1024, half) is not None
    assert blocks_for(65, 4096, 1024, half) is None
    assert blocks_for(256, 1024, 3072, half, most_rows=256) is not None
    assert blocks_for(257, 1024, 3072, half, most_rows=256) is None
    assert blocks_for(8, 9728, 2560, half, most_rows=256) is None  # large
    assert blocks_for(8, 64, 1024, torch.float32) is None
    assert blocks_for(8, 64, 1000, half) is None
