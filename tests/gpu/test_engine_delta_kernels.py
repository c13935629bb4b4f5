"""Gated delta nets of decoding rows in Triton, against the form in plain torch, token by token."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from pathlib import Path

import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from slime.algorithms.delta_layers import DeltaInputs, continue_tokens
from slime.algorithms.gated_delta import DeltaHeads
from slime.engine.kernels.cuda_kernels import CudaKernels
from slime.engine.kernels.interface import Heads, Pages, QueryKeyNorm, Rotary, Tokens
from slime.engine.kv_cache import KVCache, StateCache, StateShape
from slime.engine.models.delta_net import state_shape
from slime.engine.models.fast_model import FastModel
from tests.gpu.test_engine_kernels import DEVICE, INTERPRETED
from tests.tiny import make_tiny_checkpoint

SHAPES = [
    DeltaHeads(num_key=2, num_value=4, key_dim=16, value_dim=8),
    DeltaHeads(num_key=1, num_value=3, key_dim=24, value_dim=40),  # nothing is a power of two
]
LAYER, ROWS = 6, 9
# Two units in the last place: sums in another order may round the other way.
ROUNDING = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2**-9, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 1e-5},
}
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]  # it truncates bf16


def make_states(heads: DeltaHeads, dtype: torch.dtype, kernel: int) -> StateCache:
    shape = StateShape(layers=(2, LAYER), heads=heads, window=kernel - 1)
    states = StateCache(shape, ROWS, dtype, torch.device(DEVICE))
    states.allocate()
    generator = torch.Generator(DEVICE).manual_seed(1)
    states.matrices.normal_(generator=generator)
    states.windows.normal_(generator=generator)
    return states


def make_inputs(
    heads: DeltaHeads, count: int, dtype: torch.dtype, kernel: int
) -> tuple[DeltaInputs, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(count)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    fused = normal(count, sum(heads.widths) + 5).to(dtype)  # columns of a wider matmul
    inputs = DeltaInputs(
        mixed_qkv=fused[:, : sum(heads.widths)],
        decay=-normal(count, heads.num_value).exp(),
        beta=normal(count, heads.num_value).sigmoid().to(dtype),
    )
    return inputs, normal(sum(heads.widths), kernel).to(dtype)


@pytest.mark.parametrize("heads", SHAPES, ids=["small", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize(
    "rows",
    [[3], [5, 0, 8, 1], [4, 4, 4, 4, 4, 4, 0, 0, 7], [1, 2, 2, 8, 8, 8, 8]],
    ids=["one", "decode", "runs", "padding"],
)
def test_rows_continue(heads: DeltaHeads, dtype: torch.dtype, kernel: int, rows: list[int]):
    inputs, weight = make_inputs(heads, len(rows), dtype, kernel)
    found, naive = (make_states(heads, dtype, kernel) for _ in range(2))
    sent = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    out = CudaKernels().continue_rows(inputs, weight, heads, found, LAYER, sent)
    for token, row in enumerate(rows):
        index = torch.tensor([row], device=DEVICE)
        one = inputs.map(lambda x, token=token: x[token : token + 1])
        expected, state = continue_tokens(one, weight, heads, naive.read(LAYER, index))
        naive.write(LAYER, index, state)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[token], expected[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(found.windows, naive.windows)  # other rows and layers are untouched
    torch.testing.assert_close(found.matrices, naive.matrices, rtol=2e-2, atol=2e-2)
    untouched = [row for row in range(ROWS) if row not in rows]
    assert torch.equal(found.matrices[untouched], naive.matrices[untouched])


def test_a_run_gives_the_bits_of_single_tokens():
    """What deterministic mode rests on: a prompt's tokens in one forward or in several."""
    heads, rows = SHAPES[0], [4, 4, 4, 2]
    inputs, weight = make_inputs(heads, 4, torch.float32, 4)
    together, apart = (make_states(heads, torch.float32, 4) for _ in range(2))
    kernels = CudaKernels()
    sent = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    whole = kernels.continue_rows(inputs, weight, heads, together, LAYER, sent)
    for token in range(4):
        one = inputs.map(lambda x, token=token: x[token : token + 1])
        single = kernels.continue_rows(one, weight, heads, apart, LAYER, sent[token : token + 1])
        assert torch.equal(single[0], whole[token])
    assert torch.equal(together.matrices, apart.matrices)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_those_of_plain_torch(dtype: torch.dtype):
    """Also where softplus is tiny, and where it is its argument."""
    count, heads = 5, 6
    generator = torch.Generator(DEVICE).manual_seed(0)
    fused = torch.randn(count, 40, generator=generator, device=DEVICE).to(dtype)
    a, b = fused[:, 3:9], fused[:, 20:26]
    a[0] = torch.tensor([-30.0, -8.0, -4.6, -4.5, 19.0, 25.0])
    a_log, dt_bias = (
        torch.randn(heads, generator=generator, device=DEVICE).to(dtype) for _ in range(2)
    )
    wide = a.double() + dt_bias.double()
    decay, beta = CudaKernels().delta_gates(a, b, a_log, dt_bias)
    expected = -a_log.double().exp() * F.softplus(wide)
    torch.testing.assert_close(decay.double(), expected, rtol=2e-5, atol=0)
    torch.testing.assert_close(beta, b.float().sigmoid().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, dim", [(3, 24), (32, 128), (9, 16)])
def test_gated_norm(dtype: torch.dtype, heads: int, dim: int):
    generator = torch.Generator(DEVICE).manual_seed(0)
    out = torch.randn(4, heads, dim, generator=generator, device=DEVICE).to(dtype)
    fused = torch.randn(4, heads * dim + 7, generator=generator, device=DEVICE).to(dtype)
    z = fused[:, 7:]
    norm = Qwen3NextRMSNormGated(dim).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        expected = norm(out, z.unflatten(1, (heads, dim))).flatten(1)
        found = CudaKernels().gated_norm(out, z, norm.weight, norm.variance_epsilon)
    torch.testing.assert_close(found, expected, **ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_gates_of_attention_and_shared_expert(dtype: torch.dtype, parts: int):
    heads, dim, count = 3, 40, 4
    generator = torch.Generator(DEVICE).manual_seed(parts)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    kernels, attended, fused = CudaKernels(), normal(count, heads * dim), normal(count, 300)
    found = kernels.gate_heads(attended, fused, dim)
    for head in range(heads):
        one = slice(head * dim, (head + 1) * dim)
        gate = fused[:, (2 * head + 1) * dim : (2 * head + 2) * dim]
        expected = attended[:, one] * gate.sigmoid()
        torch.testing.assert_close(found[:, one], expected, **ROUNDING[dtype])
    routed, gate = normal(count, 1100), normal(count, 1)
    shared = normal(count, 1100) if not parts else normal(parts, count, 1100)
    total = shared.float().view(-1, count, 1100).sum(0)
    expected = (routed.float() + gate.float().sigmoid() * total).to(dtype)
    found = kernels.add_gated(routed, gate, shared)
    tolerance = ROUNDING[dtype]["rtol"]  # of the terms, which may cancel
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_and_key_norms_in_another_order(dtype: torch.dtype):
    """Zero-centred, as Hugging Face's, whose weights stay in their own order."""
    dim, heads = 24, Heads(num_query=2, num_key=1, dim=24)
    generator = torch.Generator(DEVICE).manual_seed(0)
    order = torch.randperm(dim, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    norms = [Qwen3NextRMSNorm(dim).to(DEVICE, dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_(generator=generator)
    original = torch.randn(1, 4, dim, generator=generator, device=DEVICE).to(dtype)
    qkv = torch.cat([original[:, :3, order], original[:, 3:]], 1).flatten(1)
    ones, zeros = torch.ones(4, dim, device=DEVICE), torch.zeros(4, dim, device=DEVICE)
    pages = Pages(
        keys=torch.zeros(2, 4, 1, dim, device=DEVICE, dtype=dtype),
        values=torch.zeros(2, 4, 1, dim, device=DEVICE, dtype=dtype),
        table=torch.ones(1, 1, dtype=torch.int32, device=DEVICE),
    )
    one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    CudaKernels().rope_store(
        qkv,
        Tokens(ids=one, positions=one, rows=one),
        heads,
        pages,
        Rotary(cosines=ones, sines=zeros),
        QueryKeyNorm(query=norms[0].weight, key=norms[1].weight, eps=norms[0].eps, order=order),
    )
    with torch.no_grad():
        queries, key = norms[0](original[0, :2])[:, order], norms[1](original[0, 2])[order]
    torch.testing.assert_close(qkv.view(4, dim)[:2], queries, **ROUNDING[dtype])
    torch.testing.assert_close(pages.keys[1, 0, 0], key, **ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_centred_norm(dtype: torch.dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden, delta = (
        torch.randn(3, 50, generator=generator, device=DEVICE).to(dtype) for _ in range(2)
    )
    weight = (0.01 * torch.randn(50, generator=generator, device=DEVICE)).to(dtype)
    total = hidden + delta
    wide = total.float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())
    found = CudaKernels().add_rms_norm(hidden, delta, weight, 1e-6, True)
    torch.testing.assert_close(found, expected.to(dtype))
    torch.testing.assert_close(hidden, total)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_logits_of_a_forward_without_a_plan_are_hugging_faces(tmp_path: Path, family: str):
    """What CUDA graphs hold: gated attention, the delta nets' kernels, the shared expert."""
    path = make_tiny_checkpoint(tmp_path / "m", family, weight_scale=3.0)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE)
    count, rows = 9, 2
    ids = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.inference_mode():
        expected = hf(ids[None]).logits[0]
        shape = state_shape(hf)
        assert shape is not None
        fast = FastModel(hf, CudaKernels(), context_len=64)
        states = StateCache(shape, rows, torch.float32, torch.device(DEVICE))
        cache = KVCache(fast.layers, 8, 4, torch.float32, torch.device(DEVICE), states)
        table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32, device=DEVICE)
        for first, end in ((0, 6), (6, 7), (7, 9)):  # each token in both rows
            positions = torch.arange(first, end, dtype=torch.int32, device=DEVICE).repeat(rows)
            tokens = Tokens(
                ids=ids[first:end].to(torch.int32).repeat(rows),
                positions=positions,
                rows=torch.arange(rows, dtype=torch.int32, device=DEVICE).repeat_interleave(
                    end - first
                ),
            )
            found = fast(tokens, cache, table).view(rows, end - first, -1)
            for row in range(rows):
                torch.testing.assert_close(found[row], expected[first:end], atol=2e-4, rtol=2e-4)
