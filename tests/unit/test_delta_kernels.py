"""The comparison before kernels are used, with a package of flash-linear-attention's name that is written here."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

from slime.algorithms import delta_kernels, gated_delta
from slime.algorithms.gated_delta import DeltaHeads

HEADS = DeltaHeads(num_key=2, num_value=4, key_dim=8, value_dim=6)
CPU = torch.device("cpu")
# Plain torch under the names of fla, with a step behind the output that each test chooses.
CONVOLUTION = """
import torch.nn.functional as F
from slime.algorithms.gated_delta import chunk_layout, continue_conv

def causal_conv1d(x, weight, initial_state, output_final_state, activation, cu_seqlens, chunk_indices):
    layout = chunk_layout(tuple(cu_seqlens.diff().tolist()), x.device)
    return F.silu(continue_conv(x[0], weight, layout)[0])[None], None
"""
RULE = """
import torch
from slime.algorithms.gated_delta import chunk_layout, continue_delta_rule

class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return {factor} * x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        {backward}
        return grad

def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, chunk_indices
):
    layout = chunk_layout(tuple(cu_seqlens.diff().tolist()), q.device)
    return Step.apply(continue_delta_rule(q[0], k[0], v[0], g[0], beta[0], layout)[0])[None], None
"""
REFUSAL = (
    "Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results for gated chunk_bwd_dqkwg (see "
    "#640). Please upgrade Triton to >= 3.7.1 or install tilelang: `pip install tilelang`"
)


@pytest.fixture(autouse=True)
def no_results():
    """Forget which kernels were compared, before and after each test."""
    delta_kernels._choose.cache_clear()
    yield
    delta_kernels._choose.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes `import fla` find kernels whose backward pass runs this line."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def write(backward: str, factor: float = 1.0) -> None:
        for folder in ("fla", "fla/modules", "fla/ops"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "__init__.py").touch()
        (tmp_path / "fla/modules/causal_conv1d.py").write_text(CONVOLUTION)
        (tmp_path / "fla/ops/gated_delta_rule.py").write_text(
            RULE.format(backward=backward, factor=factor)
        )

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def error_of_fla(backward: bool) -> float:
    return delta_kernels.largest_error(delta_kernels.run_fla, HEADS, torch.float32, CPU, backward)


def choose(backward: bool = True, by_timing: bool = True) -> delta_kernels.DeltaNetKernels | None:
    return delta_kernels._choose(HEADS, torch.float32, CPU, backward, by_timing)


def test_kernels_that_compute_the_same_have_no_error(install):
    install("pass")
    assert error_of_fla(backward=True) < 1e-5


@pytest.mark.parametrize("wrong", ["grad *= 1.1", "grad[-1] = float('nan')"])
def test_a_wrong_gradient_of_any_sample_is_found(install, wrong):
    install(wrong)
    assert error_of_fla(backward=False) < 1e-5
    assert not error_of_fla(backward=True) < 0.05


def test_kernels_are_the_first_ones_that_are_right(install, caplog):
    """Triton compiles nothing for a CPU, so that plain torch is left where fla's backward pass is refused."""
    install(f"raise RuntimeError({REFUSAL!r})")
    with caplog.at_level(logging.WARNING):
        assert choose(backward=False) is delta_kernels.run_fla
        assert not caplog.records
        assert choose(backward=True) is None
    refused, untried, last = (record.getMessage() for record in caplog.records)
    assert "flash-linear-attention" in refused and "upgrade Triton" in refused
    assert "slime's Triton kernels" in untried and "plain torch" in last


def test_kernels_that_are_chosen_by_timing_are_not_deterministic(install):
    install("pass")
    assert choose() is delta_kernels.run_fla
    assert choose(by_timing=False) is not delta_kernels.run_fla


def test_wrong_results_are_named_with_their_error(install, caplog):
    install("grad *= 1.5")
    with caplog.at_level(logging.WARNING):
        assert choose() is None
    assert "differ from plain torch's by 0.5 of their norm" in caplog.records[0].getMessage()


@pytest.mark.parametrize("trains", [False, True])
def test_a_pass_without_gradients_computes_what_training_does(install, monkeypatch, trains):
    """The kernels are off by 1 %, which the comparison allows and a ratio of probabilities shows."""
    install("pass" if trains else f"raise RuntimeError({REFUSAL!r})", factor=1.01)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    generator, width = torch.Generator().manual_seed(0), sum(HEADS.widths)
    mixed, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (30, 4))
    gates = torch.rand(2, 30, HEADS.num_value, generator=generator)
    inputs = mixed, weight.t().contiguous(), -gates[0], gates[1].bfloat16(), HEADS, (10, 20)
    with torch.no_grad():
        scored = delta_kernels.gated_delta_net(*inputs)
    trained = delta_kernels.gated_delta_net(*inputs)
    plain = gated_delta.gated_delta_net(*inputs)
    assert torch.equal(scored, trained)
    assert torch.equal(trained, plain) != trains
