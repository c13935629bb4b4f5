"""Packed gated delta nets on GPUs: flash-linear-attention's kernels, or slime's.

    16-bit inputs on a GPU    `run_fla` if installed and correct, else `run_triton`
    everything else           gated_delta.py, in plain torch and fp32

Both respect the boundaries of packed samples in convolution, scan and backward pass. Intermediate tensors are
rounded to 16 bits, as in Hugging Face and SGLang; states stay in fp32. Before their first use the kernels are
compared with plain torch for each shape of heads. flash-linear-attention autotunes block sizes, so
deterministic mode does not use it; on Hopper GPUs it refuses its backward pass with Triton 3.4 to 3.7.0.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from slime.algorithms import gated_delta
from slime.algorithms.gated_delta import DeltaHeads, chunk_layout, normalized, split_heads
from slime.utils.compiled import compiled_on_gpu

logger = logging.getLogger(__name__)
# Sample lengths of the comparison, which also autotunes the kernels for all lengths.
_LENS = (31, 63, 65, 937, 3000)
_TOLERANCE = 0.05  # of the norm of a result; rounding to bf16 gives less than 0.01
_Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class DeltaNetKernels(Protocol):
    """Convolution and gated delta rule of packed samples."""

    def __call__(
        self,
        mixed_qkv: torch.Tensor,  # [T, sum of heads.widths], before the convolution
        conv_weight: torch.Tensor,  # [sum of heads.widths, kernel size K]
        decay: torch.Tensor,  # [T, value heads], log of the factor of S, <= 0
        beta: torch.Tensor,  # [T, value heads]
        heads: DeltaHeads,
        lens: tuple[int, ...],
        windows: torch.Tensor | None = None,  # [N, K - 1, C], None: samples start here
        matrices: torch.Tensor | None = None,  # [N, value heads, key dim, value dim]
    ) -> _Results:
        """Return [T, value heads, value dim], and windows and matrices after the samples if given."""
        ...


def gated_delta_net(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    heads: DeltaHeads,
    lens: tuple[int, ...],
) -> torch.Tensor:
    """Return [T, value heads, value dim] for packed samples of these lengths.

    Passes without gradients use the same kernels as training passes, since their log-probs are compared.
    """
    args = (mixed_qkv, conv_weight, decay, beta, heads, lens)
    kernels = choose_kernels(mixed_qkv, heads, backward=True)
    return gated_delta.gated_delta_net(*args) if kernels is None else kernels(*args)[0]


def choose_kernels(x: torch.Tensor, heads: DeltaHeads, *, backward: bool) -> DeltaNetKernels | None:
    """Return kernels for such inputs whose results match plain torch on this device, or None."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    autotune = not torch.are_deterministic_algorithms_enabled()
    return _choose(heads, x.dtype, x.device, backward, autotune)


def run_fla(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    heads: DeltaHeads,
    lens: tuple[int, ...],
    windows: torch.Tensor | None = None,
    matrices: torch.Tensor | None = None,
) -> _Results:
    """Run the kernels of flash-linear-attention."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from slime.algorithms.triton_delta_rule import make_borders

    borders = make_borders(lens, mixed_qkv.device)
    packed = {"cu_seqlens": borders.starts, "chunk_indices": borders.chunks}
    if windows is not None:  # K columns, of which the first is never read
        windows = F.pad(windows.transpose(1, 2), (1, 0))
    mixed, windows = causal_conv1d(
        mixed_qkv.unsqueeze(0),
        conv_weight,
        initial_state=windows,
        output_final_state=windows is not None,
        activation="silu",
        **packed,
    )
    query, key, value = split_heads(mixed.squeeze(0), heads)
    out, matrices = chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in (query, key, value, decay, beta)),
        initial_state=matrices,
        output_final_state=matrices is not None,
        use_qk_l2norm_in_kernel=True,
        **packed,
    )
    after = windows if windows is None else windows[:, :, 1:].transpose(1, 2)
    return out.squeeze(0), after, matrices


def run_triton(
    mixed_qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    heads: DeltaHeads,
    lens: tuple[int, ...],
    windows: torch.Tensor | None = None,
    matrices: torch.Tensor | None = None,
) -> _Results:
    """Run slime's kernels."""
    from slime.algorithms.triton_delta_conv import conv_heads
    from slime.algorithms.triton_delta_rule import delta_rule, make_borders

    borders = make_borders(lens, mixed_qkv.device)
    if windows is None:
        query, key, value = conv_heads(mixed_qkv, conv_weight, borders.positions, heads)
    else:
        layout = chunk_layout(lens, mixed_qkv.device)
        mixed, windows = gated_delta.continue_conv(mixed_qkv, conv_weight, layout, windows)
        query, key, value = split_heads(F.silu(mixed), heads)
        query, key = _unit_rows(query, heads.key_dim**-0.5), _unit_rows(key, 1.0)
    out, matrices = delta_rule(query, key, value, decay, beta, borders, matrices)
    return out, windows, matrices


@compiled_on_gpu
def _unit_rows(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (normalized(x) * scale).to(x.dtype)


@lru_cache
def _choose(
    heads: DeltaHeads, dtype: torch.dtype, device: torch.device, backward: bool, autotune: bool
) -> DeltaNetKernels | None:
    """Return the first kernels whose results match plain torch; log why others are not used."""
    found: list[tuple[str, DeltaNetKernels]] = []
    if find_spec("fla") is not None and autotune:
        found.append(("flash-linear-attention", run_fla))
    if find_spec("triton") is not None:
        found.append(("slime's Triton kernels", run_triton))
    for name, kernels in found:
        try:
            error = largest_error(kernels, heads, dtype, device, backward)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # kernel compilers raise many types
            reason = str(error).partition("\n")[0]
        else:
            if error < _TOLERANCE:
                return kernels
            reason = f"results differ from plain torch's by {error:.1g} of their norm"
        logger.warning("gated delta nets do not use %s: %s", name, reason)
    logger.warning("gated delta nets run in plain torch, which is slow on a GPU")
    return None


@torch.inference_mode(False)
def largest_error(
    kernels: DeltaNetKernels,
    heads: DeltaHeads,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool,
) -> float:
    """Return the largest error of output and gradients, of any sample, relative to its norm.

    It is NaN if any error is. Heads are independent, so plain torch computes only the first key head.
    """
    count = heads.num_value // heads.num_key
    one = replace(heads, num_key=1, num_value=count)
    inputs = [x.requires_grad_(backward) for x in _random_inputs(heads, dtype, device)]
    ranges = zip((0, *accumulate(heads.widths)), one.widths, strict=False)
    columns = torch.cat([torch.arange(at, at + width, device=device) for at, width in ranges])
    mixed, weight, decay, beta = inputs
    # The first layer may run under activation checkpointing, whose hooks must not see this.
    with torch.set_grad_enabled(backward), saved_tensors_hooks(_same, _same):
        first = (mixed[:, columns], weight[columns], decay[:, :count], beta[:, :count])
        expected = [gated_delta.gated_delta_net(*first, one, _LENS)]
        found = [kernels(mixed, weight, decay, beta, heads, _LENS)[0][:, :count]]
        if backward:
            probe = _random(0, device)(*expected[0].shape)
            for outs in (expected, found):
                outs += torch.autograd.grad((outs[0].float() * probe).sum(), inputs)
    errors = [e for x, y in zip(expected, found, strict=True) for e in _errors(x, y)]
    return float(torch.stack(errors).max())  # unlike Python's max it does not skip a NaN


def _errors(expected: torch.Tensor, found: torch.Tensor) -> list[torch.Tensor]:
    """Return the errors relative to the norm: of each sample, or of a weight's gradient."""
    pairs = [(expected.detach().float(), found.detach().float())]
    if len(expected) == sum(_LENS):
        pairs = list(zip(*(x.split(_LENS) for x in pairs[0]), strict=True))
    return [(x - y).norm() / x.norm() for x, y in pairs]


def _random_inputs(
    heads: DeltaHeads, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    total, width, normal = sum(_LENS), sum(heads.widths), _random(1, device)
    return (
        normal(total, width).to(dtype),
        normal(width, 4).to(dtype),
        -0.1 * F.softplus(normal(total, heads.num_value)),  # weak decay exposes a leaking state
        normal(total, heads.num_value).sigmoid().to(dtype),
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _random(seed: int, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function that samples normal numbers without touching torch's global generators."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device)
