"""The mixture of experts in Triton against Hugging Face's block, and against a loop over pairs.

On a GPU, or in Triton's interpreter with TRITON_INTERPRET=1, as tests/integration/test_engine_triton.py does.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.engine.kernels.interface import AdapterRows, ExpertLora, LayerLora  # noqa: E402
from slime.engine.kernels.triton_experts import CudaExperts  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
SEEDS = range(2 if INTERPRETED else 16)
# Outputs are of size 1 and rounded three times on the way, each time by half a unit of the last place.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
KERNELS = CudaExperts()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_route_takes_the_experts_of_hugging_face(seed: int, dtype: torch.dtype):
    block, hidden = _make_case(seed, dtype)
    router = block.gate
    logits, scores, indices = router(hidden)
    experts, weights = KERNELS.route(logits, router.top_k, router.norm_topk_prob)
    probs = torch.softmax(logits.float(), -1)
    # Which of two equally probable ones is taken is open, what they weigh is not.
    torch.testing.assert_close(probs.gather(1, experts.long()), probs.gather(1, indices))
    torch.testing.assert_close(weights, scores, atol=TOLERANCE[dtype], rtol=0)
    assert all(len(set(row)) == router.top_k for row in experts.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_mix_equals_a_loop_over_pairs(seed: int, dtype: torch.dtype):
    block, hidden = _make_case(seed, dtype)
    _, scores, indices = block.gate(hidden)
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    found = KERNELS.run_experts(hidden, indices.int(), scores, gate_up, down)
    expected = torch.zeros_like(hidden, dtype=torch.float32)
    for token, experts in enumerate(indices.tolist()):
        for place, expert in enumerate(experts):
            gate, up = (gate_up[expert].float() @ hidden[token].float()).chunk(2)
            active = torch.nn.functional.silu(gate) * up
            expected[token] += scores[token, place].float() * (down[expert].float() @ active)
    torch.testing.assert_close(
        found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_both_equal_hugging_faces_block(seed: int):
    block, hidden = _make_case(seed, torch.float32)
    logits = torch.nn.functional.linear(hidden, block.gate.weight)
    chosen = KERNELS.route(logits, block.gate.top_k, block.gate.norm_topk_prob)
    found = KERNELS.run_experts(
        hidden, *chosen, block.experts.gate_up_proj, block.experts.down_proj
    )
    torch.testing.assert_close(found, block(hidden[None])[0], atol=2e-5, rtol=2e-5)


def test_a_token_does_not_depend_on_its_company():
    """Bit by bit, for the same number of rows."""
    block, hidden = _make_case(3, DTYPES[0], num_tokens=32)
    other = torch.randn_like(hidden)
    other[7] = hidden[7]
    first, second = (_run(block, rows)[7] for rows in (hidden, other))
    assert torch.equal(first, second)


def test_logits_that_are_no_numbers_stay_visible():
    block, hidden = _make_case(1, DTYPES[0])
    hidden[0] = float("nan")
    assert torch.isnan(_run(block, hidden)[0]).all()
    assert not torch.isnan(_run(block, hidden)[1:]).any()


def _run(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, block.gate.weight)
    chosen = KERNELS.route(logits, block.gate.top_k, block.gate.norm_topk_prob)
    return KERNELS.run_experts(hidden, *chosen, block.experts.gate_up_proj, block.experts.down_proj)


@torch.no_grad()
def _make_case(seed: int, dtype: torch.dtype, num_tokens: int = 0) -> tuple[Any, torch.Tensor]:
    """A block of random sizes, no multiples of any block of the kernels, and tokens for it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num = rng.choice([4, 7, 16])
    config = Qwen3MoeConfig(
        hidden_size=rng.choice([24, 64, 136]),
        moe_intermediate_size=rng.choice([16, 40, 136]),
        num_experts=num,
        num_experts_per_tok=rng.randint(1, min(4, num)),
        norm_topk_prob=rng.random() < 0.7,
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    tokens = num_tokens or rng.choice([1, 5, 33, 90])
    hidden = torch.randn(tokens, config.hidden_size)
    return block.to(DEVICE, dtype), hidden.to(DEVICE, dtype)


@pytest.mark.parametrize("parts", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_adapters_of_experts(tokens: int, parts: tuple[bool, bool]):
    """Three slots of different ranks and tokens without an adapter, against a loop over pairs."""
    torch.manual_seed(tokens)
    slots, num, size, width, most, top = 3, 5, 48, 24, 6, 2
    ranks = np.array([6, 2, 4], np.int32)
    scales = torch.tensor([0.5, 2.0, 1.5], device=DEVICE)

    def slots_of(columns: int, rows: int) -> ExpertLora:
        a, b = torch.randn(slots, num, most, columns) / 6, torch.randn(slots, num, rows, most) / 3
        for slot, rank in enumerate(ranks):
            a[slot, :, rank:], b[slot, :, :, rank:] = 0, 0
        return ExpertLora(a=a.to(DEVICE), b=b.to(DEVICE), scales=scales, ranks=ranks)

    gate_up, down = slots_of(size, 2 * width), slots_of(width, size)
    lora = LayerLora(gate_up=gate_up if parts[0] else None, down=down if parts[1] else None)
    hidden = torch.randn(tokens, size, device=DEVICE)
    experts = torch.stack([torch.randperm(num)[:top] for _ in range(tokens)]).int().to(DEVICE)
    weights = torch.rand(tokens, top, device=DEVICE)
    w_gate_up = torch.randn(num, 2 * width, size, device=DEVICE) / 7
    w_down = torch.randn(num, size, width, device=DEVICE) / 5
    rows = AdapterRows(slots=torch.randint(-1, slots, (tokens,)).int().to(DEVICE))
    found = KERNELS.run_experts(hidden, experts, weights, w_gate_up, w_down, lora, rows)
    base = KERNELS.run_experts(hidden, experts, weights, w_gate_up, w_down)

    def matmul(x, weight, adapter, slot, expert):
        out = weight[expert] @ x
        if adapter is not None and slot >= 0:
            out = out + scales[slot] * (adapter.b[slot, expert] @ (adapter.a[slot, expert] @ x))
        return out

    for token in range(tokens):
        slot, expected = int(rows.slots[token]), torch.zeros(size, device=DEVICE)
        for place in range(top):
            expert = int(experts[token, place])
            gate, up = matmul(hidden[token], w_gate_up, lora.gate_up, slot, expert).chunk(2)
            active = torch.nn.functional.silu(gate) * up
            expected += weights[token, place] * matmul(active, w_down, lora.down, slot, expert)
        torch.testing.assert_close(found[token], expected, rtol=1e-4, atol=1e-4)
        if slot < 0:
            assert torch.equal(found[token], base[token])
