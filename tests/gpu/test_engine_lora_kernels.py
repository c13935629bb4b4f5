"""The Triton kernels of adapters against a naive sum per token, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import random

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.engine.kernels.cuda_kernels import CudaKernels  # noqa: E402
from slime.engine.kernels.interface import AdapterRows, LoraWeights  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
WIDTHS = [(48,), (64, 40), (96, 32, 32)]
KERNELS = CudaKernels()


class Case:
    """Random adapters of different ranks in a few slots; smaller ones leave zeros, as the bank does."""

    def __init__(self, seed: int, widths: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        num_slots, most = rng.choice([1, 3, 5]), rng.choice([3, 16, 24])
        self.depth = rng.choice([56, 64, 320])
        a = torch.zeros(num_slots, len(widths) * most, self.depth)
        b = torch.zeros(num_slots, sum(widths), most)
        ranks = [[rng.randint(1, most) for _ in widths] for _ in range(num_slots)]
        for slot in range(num_slots):
            for part, rank in enumerate(ranks[slot]):
                first = sum(widths[:part])
                a[slot, part * most : part * most + rank] = torch.randn(rank, self.depth)
                b[slot, first : first + widths[part], :rank] = torch.randn(widths[part], rank)
        self.weights = LoraWeights(
            a=(a * self.depth**-0.5).to(DEVICE, dtype),
            b=b.to(DEVICE, dtype),
            widths=widths,
            scales=torch.rand(num_slots).to(DEVICE) + 0.5,
            ranks=ranks,
        )
        slots = [rng.randrange(-1, num_slots) for _ in range(tokens)]
        self.rows = AdapterRows(slots=torch.tensor(slots, dtype=torch.int32, device=DEVICE))
        self.x = torch.randn(tokens, self.depth, device=DEVICE).to(dtype)

    def naive(self, token: int) -> torch.Tensor:
        """Return what the adapter of one token adds, in fp32."""
        weights, slot = self.weights, int(self.rows.slots[token])
        a, b = weights.a[slot].float(), weights.b[slot].float()
        most, sums, first = b.shape[1], [], 0
        for part, width in enumerate(weights.widths):
            low = a[part * most : (part + 1) * most] @ self.x[token].float()
            sums.append(b[first : first + width] @ low * weights.scales[slot])
            first += width
        return torch.cat(sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("tokens", [1, 19, 70])
@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "partial sums"])
def test_adapters_are_added(widths, tokens: int, in_parts: bool, dtype: torch.dtype):
    case = Case(tokens + len(widths), widths, tokens, dtype)
    shape = (2, tokens, sum(widths)) if in_parts else (tokens, sum(widths))
    out = torch.randn(shape, device=DEVICE).to(torch.float32 if in_parts else dtype)
    before = out.clone()
    KERNELS.add_lora(out, case.x, case.weights, case.rows)
    if in_parts:
        assert torch.equal(out[1], before[1])
        out, before = out[0], before[0]
    for token in range(tokens):
        if case.rows.slots[token] < 0:
            assert torch.equal(out[token], before[token])
            continue
        expected = before[token].float() + case.naive(token)
        error = (out[token].float() - expected).abs().max()
        assert error <= TOLERANCE[dtype] * expected.abs().max()


def test_a_token_does_not_depend_on_the_adapters_of_others():
    """Bit for bit, for the same number of tokens: what deterministic mode needs."""
    case = Case(3, (96, 32, 32), 32, DTYPES[0])
    found = []
    for others in (-1, 0):
        slots = torch.full_like(case.rows.slots, others)
        slots[5] = case.weights.a.shape[0] - 1
        out = torch.ones(32, 160, device=DEVICE, dtype=DTYPES[0])
        KERNELS.add_lora(out, case.x, case.weights, AdapterRows(slots=slots))
        found.append(out[5])
    assert torch.equal(*found)
