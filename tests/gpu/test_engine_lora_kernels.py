"""The Triton kernels of adapters against a naive sum per token, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.engine.kernels import triton_lora, triton_matmuls  # noqa: E402
from slime.engine.kernels.cuda_kernels import CudaKernels  # noqa: E402
from slime.engine.kernels.interface import AdapterRows, LoraWeights, Tokens  # noqa: E402
from slime.engine.kernels.triton_lora import choose_tiles  # noqa: E402
from slime.engine.kv_cache import KVCache  # noqa: E402
from slime.engine.lora import bank as banks  # noqa: E402
from slime.engine.lora.bank import LoraBank  # noqa: E402
from slime.engine.lora.store import AdapterStore  # noqa: E402
from slime.engine.models.fast_model import FastModel  # noqa: E402
from tests.adapters import make_adapter, peft_log_probs  # noqa: E402
from tests.tiny import make_tiny_checkpoint  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
WIDTHS = [(48,), (150, 40), (136, 32, 32), (136, 130, 3, 1)]  # four: those of a gated delta net
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
            ranks=np.array(ranks, np.int32),
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
@pytest.mark.parametrize("tokens", [1, 70])
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [19, 70, 260])
def test_gate_and_up_take_their_adapters_before_the_activation(tokens: int, dtype: torch.dtype):
    """The same bits as `add_lora` and `silu_mul` one after the other; gate_up itself is not changed."""
    case = Case(tokens, (136, 136), tokens, dtype)
    gate_up = torch.randn(tokens, 272, device=DEVICE).to(dtype)
    before = gate_up.clone()
    found = triton_lora.silu_mul_lora(gate_up, case.x, case.weights, case.rows)
    assert torch.equal(gate_up, before)
    plain = KERNELS.silu_mul(gate_up)
    KERNELS.add_lora(gate_up, case.x, case.weights, case.rows)
    assert torch.equal(found, KERNELS.silu_mul(gate_up))
    base = case.rows.slots < 0
    assert torch.equal(found[base], plain[base])
    assert not torch.equal(found[~base], plain[~base])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(150, 40), (136, 130, 3, 1), (136, 136)])
@pytest.mark.parametrize("splits", [1, 3])
def test_one_matmul_computes_base_and_a(
    widths: tuple[int, ...], splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """A below the base's weight, and rows of padding; `splits`: the matmul returns partial sums."""
    case = Case(splits + len(widths), widths, 70, dtype)
    base = (torch.randn(sum(widths), case.depth, device=DEVICE) * case.depth**-0.5).to(dtype)
    biases = torch.randn(sum(widths), device=DEVICE).to(dtype)
    below = case.weights.a.flatten(0, 1)
    padding = torch.full((7, case.depth), 9.0, device=DEVICE, dtype=dtype)
    weights = replace(
        case.weights,
        joined=(
            torch.cat([base, below, padding]),
            torch.cat([biases, biases.new_zeros(len(below) + 7)]),
        ),
    )
    if splits > 1:

        def in_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            pairs = zip(x.float().chunk(splits, 1), weight.float().chunk(splits, 1), strict=True)
            sums = torch.stack([F.linear(a, b) for a, b in pairs])
            sums[0] += bias.float()
            return sums

        monkeypatch.setattr(triton_matmuls, "linear_split_k", in_parts)
    args = (case.x, (base, biases), weights, case.rows)
    found = KERNELS.linear_lora(*args, split_k=True)
    expected = F.linear(case.x.float(), base.float(), biases.float())
    for token in (case.rows.slots >= 0).nonzero().flatten().tolist():
        expected[token] += case.naive(token)
    assert found.shape == expected.shape
    assert (found.float() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    if widths == (136, 136):
        found = KERNELS.gated_linear_lora(*args)
        gate, up = expected.chunk(2, 1)
        expected = F.silu(gate) * up
        assert (found.float() - expected).abs().max() <= 2 * TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("num_slots", [1, 3])
def test_adapters_with_b_of_zero_are_the_base_bit_for_bit(num_slots: int):
    case = Case(1, (136, 136), 70, DTYPES[0])
    weights = case.weights
    weights = replace(
        weights,
        a=weights.a[:1].repeat(num_slots, 1, 1),
        b=torch.zeros(num_slots, *weights.b.shape[1:], device=DEVICE, dtype=DTYPES[0]),
        scales=torch.ones(num_slots, device=DEVICE),
    )
    slots = torch.arange(70, dtype=torch.int32, device=DEVICE) % (num_slots + 1) - 1
    rows, before = AdapterRows(slots=slots), torch.randn(70, 272, device=DEVICE).to(DTYPES[0])
    out = before.clone()
    KERNELS.add_lora(out, case.x, weights, rows)
    assert torch.equal(out, before)
    found = triton_lora.silu_mul_lora(before, case.x, weights, rows)
    assert torch.equal(found, KERNELS.silu_mul(before))


def test_a_token_does_not_depend_on_the_adapters_of_others():
    """Bit for bit, for the same number of tokens: what deterministic mode needs."""
    case = Case(5, (64, 64), 32, DTYPES[0])
    assert case.weights.a.shape[0] > 1
    found = []
    for others in (-1, 0):
        slots = torch.full_like(case.rows.slots, others)
        slots[5] = case.weights.a.shape[0] - 1
        rows, out = AdapterRows(slots=slots), torch.ones(32, 128, device=DEVICE, dtype=DTYPES[0])
        active = triton_lora.silu_mul_lora(out, case.x, case.weights, rows)
        KERNELS.add_lora(out, case.x, case.weights, rows)
        found.append((out[5], active[5]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_tiles_of_decoding_fill_the_gpu():
    """Qwen3-4B at 256 tokens and rank 16: enough programs, and few bytes of partial sums per output tile."""
    for depth, widths in [
        (2560, (4096, 1024, 1024)),
        (4096, (2560,)),
        (2560, (9728, 9728)),
        (9728, (2560,)),
    ]:
        x = torch.empty(256, depth, dtype=torch.bfloat16, device="meta")
        b = torch.empty(1, sum(widths), 16, device="meta")
        weights = LoraWeights(a=b, b=b, widths=widths, scales=b, ranks=np.zeros(1, np.int32))
        tiles = choose_tiles(x, weights)
        assert tiles.rows * tiles.block_m == 256
        assert tiles.splits * tiles.split_depth >= depth > (tiles.splits - 1) * tiles.split_depth
        assert tiles.columns == sum(-(-width // 128) for width in widths)
        assert tiles.rows * len(widths) * tiles.splits >= 64
        summed = tiles.rows * tiles.columns * tiles.splits * tiles.block_m * 16 * 4
        assert summed <= 12 << 20


@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_the_fast_forward_is_pefts(joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two sequences of one batch with adapters of different ranks, and the base."""
    monkeypatch.setattr(banks, "_JOINED_SHARE", 0 if joined else 1 << 20)
    base = make_tiny_checkpoint(tmp_path / "base", weight_scale=3.0)
    folders = [
        make_adapter(base, tmp_path / "a", rank=3, targets=["q_proj", "v_proj", "down_proj"]),
        make_adapter(base, tmp_path / "b", seed=1, rank=20),
        None,
    ]
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = model.to(DEVICE)
    bank = LoraBank(model, num_slots=4, rank=20)
    count, page = 5, 8
    with torch.inference_mode():
        fast = FastModel(model, KERNELS, 64, bank)
        if INTERPRETED:  # the bank of a CPU has the layout of the C kernels
            for weights, _ in bank.modules.values():
                weights.b = weights.b.contiguous()
        weights = [w for w, _ in bank.modules.values() if isinstance(w, LoraWeights)]
        assert all((w.joined is not None) is joined for w in weights)
        store = AdapterStore(bank)
        slots = [store.load_folder(p.name, str(p), "0").slot if p else -1 for p in folders]
        cache = KVCache(fast.layers, 4, page, torch.float32, torch.device(DEVICE))
        ids = torch.randint(0, 256, (len(folders), count), generator=torch.manual_seed(0))

        def repeat(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE).repeat_interleave(count)

        tokens = Tokens(
            ids=ids.view(-1).to(DEVICE, torch.int32),
            positions=torch.arange(count, dtype=torch.int32, device=DEVICE).repeat(len(folders)),
            rows=repeat([0, 1, 2]),
            adapters=AdapterRows(slots=repeat(slots)),
        )
        table = torch.tensor([[1], [2], [3]], dtype=torch.int32, device=DEVICE)
        logits = fast(tokens, cache, table).view(len(folders), count, -1)
    for row, folder in enumerate(folders):
        targets = ids[row, 1:, None].to(DEVICE)
        found = logits[row, :-1].log_softmax(-1).gather(1, targets).squeeze(1)
        expected = peft_log_probs(base, folder, ids[row].tolist())
        torch.testing.assert_close(found.cpu(), expected, atol=5e-4, rtol=5e-4)
