"""slime's Triton kernels of the gated delta rule over packed samples, against a loop over tokens in fp64.

On a GPU, or in Triton's interpreter with TRITON_INTERPRET=1, as tests/integration/test_engine_triton.py does.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from slime.algorithms import delta_kernels, gated_delta
from slime.algorithms.gated_delta import DeltaHeads
from slime.algorithms.triton_delta_conv import conv_heads
from slime.algorithms.triton_delta_rule import delta_rule, make_borders
from tests.gpu.test_engine_kernels import DEVICE, INTERPRETED

SMALL = DeltaHeads(num_key=1, num_value=2, key_dim=16, value_dim=16)
ODD = DeltaHeads(num_key=2, num_value=2, key_dim=24, value_dim=40)  # nothing is a power of two
WIDE = DeltaHeads(num_key=1, num_value=1, key_dim=128, value_dim=128)  # two blocks of columns
LENS = [(1, 66), *([] if INTERPRETED else [(1,), (64,), (1, 63, 130), (1000, 64)])]
NAMES = ("query", "key", "value", "decay", "beta")
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter truncates bf16
# A GPU compiles the kernels for each of them, which takes half a minute.
KINDS = [(ODD, torch.float32), (ODD, HALF), (WIDE, HALF)]
KINDS += [(WIDE, torch.float32)] if INTERPRETED else []
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of the norm


def make_inputs(
    heads: DeltaHeads, lens: tuple[int, ...], dtype: torch.dtype, rate: float = 1.0, seed: int = 0
) -> list[torch.Tensor]:
    """Normalized queries and keys, values, log decays (`rate` multiplies them), beta; decays are in fp32."""
    generator, total = torch.Generator(DEVICE).manual_seed(seed), sum(lens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    query, key = (gated_delta.normalized(normal(total, heads.num_key, heads.key_dim)) for _ in "qk")
    values = normal(total, heads.num_value, heads.value_dim)
    decay = -0.1 * rate * normal(total, heads.num_value).exp()
    beta = normal(total, heads.num_value).sigmoid()
    inputs = [x.to(dtype) for x in (query * heads.key_dim**-0.5, key, values, decay, beta)]
    inputs[3] = decay
    return [x.requires_grad_() for x in inputs]


def token_loop(
    inputs: list[torch.Tensor], lens: tuple[int, ...], states: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule as it is defined, one token after another of one sample after another."""
    query, key, value, decay, beta = inputs
    repeats = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
    outs, ends = [], []
    for sample, tokens in enumerate(torch.arange(sum(lens)).split(lens)):
        shape = (value.shape[1], key.shape[2], value.shape[2])
        state = value.new_zeros(shape) if states is None else states[sample]
        for t in tokens:
            state = state * decay[t].exp()[:, None, None]
            read = torch.einsum("hkv,hk->hv", state, key[t])
            written = beta[t][:, None] * (value[t] - read)
            state = state + key[t][:, :, None] * written[:, None, :]
            outs.append(torch.einsum("hkv,hk->hv", state, query[t]))
        ends.append(state)
    return torch.stack(outs), torch.stack(ends)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    assert found.isfinite().all(), name
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < tolerance, f"{name}: {error:.2g}"


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize(
    "heads, dtype", KINDS, ids=lambda one: getattr(one, "key_dim", None) or str(one)
)
def test_output_and_gradients_are_those_of_the_token_loop(
    heads: DeltaHeads, dtype: torch.dtype, lens: tuple[int, ...]
):
    compare(heads, lens, dtype, rate=1.0)


@pytest.mark.parametrize("rate", [0.001, 50.0], ids=["long memory", "strong decay"])
def test_extreme_decays(rate: float):
    compare(SMALL, (150, 70), torch.float32, rate)


def compare(heads: DeltaHeads, lens: tuple[int, ...], dtype: torch.dtype, rate: float) -> None:
    inputs = make_inputs(heads, lens, dtype, rate)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = delta_rule(*inputs, make_borders(lens, torch.device(DEVICE)))[0]
    expected = token_loop(exact, lens)[0]
    assert found.dtype == dtype
    for n, (one, other) in enumerate(zip(found.split(lens), expected.split(lens), strict=True)):
        assert_near(one, other, TOLERANCE[dtype], f"sample {n}")
    probe = torch.randn(
        found.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE
    )
    grads = torch.autograd.grad((found.float() * probe).sum(), inputs)
    wanted = torch.autograd.grad((expected * probe).sum(), exact)
    # A long memory sums gradients that cancel; those of one token are sums of a few rounded products.
    cancels = {"decay": 4} if len(inputs[0]) > 1 else dict.fromkeys(NAMES, 4)
    for name, one, other in zip(NAMES, grads, wanted, strict=True):
        assert_near(one, other, cancels.get(name, 1) * TOLERANCE[dtype], name)


@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 20))
def test_neighbours_change_no_bit_of_a_sample(seed: int):
    rng = random.Random(seed)
    lens = tuple(rng.randint(1, 140) for _ in range(3))
    inputs = make_inputs(SMALL, lens, HALF, seed=seed)
    device = torch.device(DEVICE)
    together = delta_rule(*inputs, make_borders(lens, device))[0]
    grads = torch.autograd.grad(together.float().square().sum(), inputs)
    start = 0
    for length in lens:
        part = slice(start, start + length)
        alone = [x.detach()[part].clone().requires_grad_() for x in inputs]
        single = delta_rule(*alone, make_borders((length,), device))[0]
        assert torch.equal(together[part], single)
        for grad, lone in zip(
            grads, torch.autograd.grad(single.float().square().sum(), alone), strict=True
        ):
            assert torch.equal(grad[part], lone)
        start += length


@pytest.mark.parametrize("cut", [1, 37, 64])
def test_states_continue_a_sample(cut: int):
    """Two calls with the state between them compute what the token loop does from the same first state."""
    heads, lens = ODD, (100, 70)
    inputs = [x.detach() for x in make_inputs(heads, lens, torch.float32)]
    shape = (2, heads.num_value, heads.key_dim, heads.value_dim)
    states = torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE)
    expected, ends = token_loop([x.double() for x in inputs], lens, states.double())
    first = torch.cat([torch.arange(cut), 100 + torch.arange(cut)])
    rest = torch.cat([torch.arange(cut, 100), 100 + torch.arange(cut, 70)])
    found = torch.empty_like(inputs[2])
    for tokens, parts in ((first, (cut, cut)), (rest, (100 - cut, 70 - cut))):
        tokens = tokens.to(DEVICE)
        borders = make_borders(parts, torch.device(DEVICE))
        out, after = delta_rule(*(x[tokens] for x in inputs), borders, states)
        assert after is not None and after.dtype == torch.float32
        found[tokens], states = out, after
    assert_near(found, expected, 2e-5, "output")
    assert_near(states, ends, 2e-5, "states")


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize(
    "heads, dtype", KINDS, ids=lambda one: getattr(one, "key_dim", None) or str(one)
)
def test_convolution_and_its_gradients_are_those_of_single_samples(
    heads: DeltaHeads, dtype: torch.dtype, lens: tuple[int, ...]
):
    """Also where x is a part of wider rows, as Megatron's projections are, or transposed, and the weight frozen."""
    generator, width = torch.Generator(DEVICE).manual_seed(4), sum(heads.widths)
    wide = torch.randn(sum(lens), width + 16, generator=generator, device=DEVICE).to(dtype)
    weight = torch.randn(width, 4, generator=generator, device=DEVICE).to(dtype)
    inputs = [wide.requires_grad_(), weight.requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    borders = make_borders(lens, torch.device(DEVICE))
    found = conv_heads(inputs[0][:, 8:-8], inputs[1], borders.positions, heads)
    samples = [naive_conv(x, exact[1], heads) for x in exact[0][:, 8:-8].split(lens)]
    expected = [torch.cat(parts) for parts in zip(*samples, strict=True)]
    probes = [torch.randn(x.shape, generator=generator, device=DEVICE).to(dtype) for x in found]
    grads = torch.autograd.grad(found, inputs, probes)
    wanted = torch.autograd.grad(expected, exact, [probe.double() for probe in probes])
    names = ("query", "key", "value", "d_x", "d_weight")
    for name, one, other in zip(names, (*found, *grads), (*expected, *wanted), strict=True):
        assert one.dtype == dtype
        assert_near(one, other, TOLERANCE[dtype], name)
    columns = inputs[0].detach()[:, 8:-8].t().contiguous().t().requires_grad_()
    frozen = conv_heads(columns, inputs[1].detach(), borders.positions, heads)
    (grad,) = torch.autograd.grad(frozen, [columns], probes)
    assert all(map(torch.equal, (*frozen, grad), (*found, grads[0][:, 8:-8])))


def naive_conv(
    x: torch.Tensor, weight: torch.Tensor, heads: DeltaHeads
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of one sample in fp64, by torch's own convolution."""
    before = F.pad(x.t()[None], (weight.shape[1] - 1, 0))
    mixed = F.silu(F.conv1d(before, weight[:, None], groups=len(weight))[0].t())
    query, key, value = gated_delta.split_heads(mixed, heads)
    query, key = gated_delta.normalized(query), gated_delta.normalized(key)
    return query * heads.key_dim**-0.5, key, value


def test_the_whole_net_passes_the_comparison_before_the_first_use(monkeypatch: pytest.MonkeyPatch):
    if INTERPRETED:
        monkeypatch.setattr(delta_kernels, "_LENS", (3, 65))
    heads, device = (
        DeltaHeads(num_key=2, num_value=4, key_dim=16, value_dim=16),
        torch.device(DEVICE),
    )
    error = delta_kernels.largest_error(delta_kernels.run_triton, heads, HALF, device, True)
    assert error < 0.02
