"""Gated delta net layers of Hugging Face models, for trainers and engine, with functions that continue a state.

Projections are Hugging Face's; convolution, delta rule and the norm after it are slime's (delta_kernels.py,
gated_delta.py). The state of a sequence is the last K - 1 inputs of the convolution and the matrix S of every
head: an engine computes a prompt in chunks of any size, and then one token per sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slime.algorithms.delta_kernels import choose_kernels
from slime.algorithms.gated_delta import DeltaHeads, normalized, run_torch, split_heads
from slime.utils.compiled import compiled_on_gpu

# The classes differ only in their input projections.
_CLASSES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


@dataclass(kw_only=True, eq=False)
class DeltaState:
    """The states of N sequences."""

    windows: torch.Tensor  # [N, K - 1, C], in the dtype of the inputs
    matrices: torch.Tensor  # [N, value heads, key dim, value dim], fp32


@dataclass(kw_only=True, eq=False)
class DeltaInputs:
    """The outputs of a layer's input projections for T tokens."""

    mixed_qkv: torch.Tensor  # [T, C], before the convolution
    decay: torch.Tensor  # [T, value heads], log of the factor of S
    beta: torch.Tensor  # [T, value heads]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> DeltaInputs:
        """Apply a function to each tensor, such as a selection of tokens."""
        return DeltaInputs(
            mixed_qkv=function(self.mixed_qkv),
            decay=function(self.decay),
            beta=function(self.beta),
        )


def find_delta_nets(model: nn.Module) -> list[Any]:
    """Return the gated delta nets of a model."""
    return [module for module in model.modules() if type(module).__name__ in _CLASSES]


def heads_of(module: Any) -> DeltaHeads:
    return DeltaHeads(
        num_key=module.num_k_heads,
        num_value=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
    )


def project(module: Any, hidden: torch.Tensor) -> tuple[DeltaInputs, torch.Tensor]:
    """Return the inputs of convolution and delta rule for hidden [1, T, H], and the gate z of the norm."""
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next interleaves them by key head
        projected = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        query, key, value, z, b, a = module.fix_query_key_value_ordering(*projected)
        qkv = torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1)
    else:
        qkv, z = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
    decay, beta = delta_gates(a.squeeze(0), b.squeeze(0), module.A_log, module.dt_bias)
    return DeltaInputs(mixed_qkv=qkv.squeeze(0), decay=decay, beta=beta), z


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decay in fp32 and beta, [T, value heads] like a and b."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias), b.sigmoid()


def conv_weight(module: Any) -> torch.Tensor:
    """Return the weight of the convolution, [C, K]."""
    return module.conv1d.weight.squeeze(1)


def finish(module: Any, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return the output of the layer, [T, H], for the delta rule's [T, value heads, value dim]."""
    normed = gated_norm(out, z.reshape(out.shape), module.norm.weight, module.layer_norm_epsilon)
    return module.out_proj(normed.flatten(1))


@compiled_on_gpu
def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return RMSNorm of the last dimension times silu(gate), with Hugging Face's roundings on a CPU."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


def continue_sequences(
    inputs: DeltaInputs,
    conv_weight: torch.Tensor,  # [C, K]
    heads: DeltaHeads,
    lens: tuple[int, ...],
    state: DeltaState,
) -> tuple[torch.Tensor, DeltaState]:
    """Return the outputs [T, value heads, value dim] of N packed sequences, and their states after them."""
    mixed_qkv, decay, beta = inputs.mixed_qkv, inputs.decay, inputs.beta
    kernels = choose_kernels(mixed_qkv, heads, backward=torch.is_grad_enabled()) or run_torch
    sent = (mixed_qkv, conv_weight, decay, beta, heads, lens, state.windows, state.matrices)
    out, windows, matrices = kernels(*sent)
    assert windows is not None and matrices is not None
    return out, DeltaState(windows=windows, matrices=matrices)


def continue_tokens(
    inputs: DeltaInputs, conv_weight: torch.Tensor, heads: DeltaHeads, state: DeltaState
) -> tuple[torch.Tensor, DeltaState]:
    """Return the output of one token per sequence, [N, value heads, value dim], and the states after it.

    Shapes depend only on the batch size, so that CUDA graphs can capture it and a sequence's bits do not
    depend on the values of other sequences.
    """
    window = torch.cat([state.windows, inputs.mixed_qkv.unsqueeze(1)], dim=1)  # [N, K, C]
    mixed = (window.float() * conv_weight.t().float()).sum(1).to(window.dtype)
    query, key, value = split_heads(F.silu(mixed), heads)
    repeats = heads.num_value // heads.num_key
    query = normalized(query) * heads.key_dim**-0.5
    q, k = (x.repeat_interleave(repeats, 1).unsqueeze(-1) for x in (query, normalized(key)))
    matrices = state.matrices * inputs.decay.float().exp()[:, :, None, None]
    change = (value.float() - (matrices * k).sum(2)) * inputs.beta.float().unsqueeze(-1)
    matrices = matrices + k * change.unsqueeze(2)
    out = (matrices * q).sum(2).to(value.dtype)
    return out, DeltaState(windows=window[:, 1:], matrices=matrices)
