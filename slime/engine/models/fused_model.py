"""The forward of Llama-like models in few operations.

Hugging Face's modules spend most of a decoding step on small operations and on Python between them.
For the families below the same mathematics runs on the same parameters with far fewer of both: one
matrix product for query, key and value, one for gate and up, one norm and one rotation for query and
key heads together, the residual added by the product before it.

    qkv weight  | q rows | k rows | v rows |     q_proj.weight, k_proj.weight, v_proj.weight
                                                 become views of their rows

so that whoever writes to a parameter writes to the fused matrix. Other models run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from slime.engine.models.attention import attend

logger = logging.getLogger(__name__)
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FAMILIES = {
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
}


def make_forward(model: PreTrainedModel) -> Forward:
    """(token ids [T], positions [T], rows [R]) -> logits [R, V] of those rows."""
    if type(model).__name__ in FAMILIES and type(model).__module__.startswith("transformers."):
        return FusedModel(model)
    logger.info("%s runs as Hugging Face defines it: no fused forward", type(model).__name__)

    def plain(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
        ).logits[0]

    return plain


class FusedModel:
    def __init__(self, model: PreTrainedModel) -> None:
        body: Any = model.model
        self._embedding: Any = model.get_input_embeddings().weight
        self._rotary = body.rotary_emb
        self._layers = [_Layer(layer) for layer in body.layers]
        self._norm = body.norm
        self._head: Any = model.get_output_embeddings()

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        hidden = F.embedding(ids, self._embedding)  # [T, H]
        cos, sin = self._rotary(hidden, positions.unsqueeze(0))
        cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)  # [T, 1, D]
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for layer in self._layers:
            hidden = layer(hidden, cos, sin)
        hidden = _rms_norm(hidden[rows], self._norm.weight, self._norm.variance_epsilon)
        return self._head(hidden)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self._index: int = attention.layer_idx
        self._scale: float = attention.scaling
        self._window: int | None = getattr(attention, "sliding_window", None)
        self._head_dim: int = attention.head_dim
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads = [p.out_features // self._head_dim for p in projections]
        self._qkv, self._qkv_bias = join_linears(attention, "qkv", projections)
        self._qk_norm = (
            _QueryKeyNorm(attention, self._heads) if hasattr(attention, "q_norm") else None
        )
        self._out = attention.o_proj
        self._norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self._mlp = _GatedMlp(layer.mlp) if hasattr(layer.mlp, "gate_proj") else _Experts(layer.mlp)

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        num_query, num_key, _ = self._heads
        before, after = self._norms
        normed = _rms_norm(hidden, before.weight, before.variance_epsilon)
        qkv = F.linear(normed, self._qkv, self._qkv_bias)
        qkv = qkv.view(hidden.shape[0], -1, self._head_dim)  # [T, Hq + 2 Hkv, D]
        qk = qkv[:, : num_query + num_key]
        if self._qk_norm is not None:
            qk = self._qk_norm(qk)
        # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); the sign lies in `sin`
        qk = torch.addcmul(qk * cos, qk.roll(self._head_dim // 2, -1), sin)
        attended = attend(
            self._index,
            qk[:, :num_query],
            qk[:, num_query:],
            qkv[:, num_query + num_key :],
            self._scale,
            self._window,
        )
        hidden = _add_linear(hidden, attended.reshape(hidden.shape[0], -1), self._out)
        return self._mlp(hidden, _rms_norm(hidden, after.weight, after.variance_epsilon))


class _QueryKeyNorm:
    """The norms of query heads and of key heads as one over both."""

    def __init__(self, attention: Any, heads: list[int]) -> None:
        query, key = attention.q_norm, attention.k_norm
        self._eps: float = query.variance_epsilon
        self._weights = torch.stack([query.weight.data, key.weight.data])
        keep_tensor(attention, "qk_norm_weights", self._weights)
        query.weight.data, key.weight.data = self._weights[0], self._weights[1]
        kinds = torch.tensor([0] * heads[0] + [1] * heads[1], device=self._weights.device)
        self._kinds = kinds
        keep_tensor(attention, "qk_norm_kinds", kinds)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return _rms_norm(heads, self._weights.index_select(0, self._kinds), self._eps)


class _GatedMlp:
    def __init__(self, mlp: Any) -> None:
        self._gate_up, self._bias = join_linears(mlp, "gate_up", (mlp.gate_proj, mlp.up_proj))
        self._act: Callable[[torch.Tensor], torch.Tensor] = mlp.act_fn
        self._down = mlp.down_proj

    def __call__(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(hidden, self._gate_up, self._bias).chunk(2, dim=-1)
        return _add_linear(residual, self._act(gate).mul_(up), self._down)


class _Experts:
    """A mixture of experts, run as Hugging Face defines it."""

    def __init__(self, mlp: Any) -> None:
        self._mlp = mlp

    def __call__(self, residual: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        output = self._mlp(hidden.unsqueeze(0))
        return residual + (output[0] if isinstance(output, tuple) else output)[0]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension; `weight` may vary along others."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        size = x.shape[-1]
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * inverse.square_().div_(size).add_(eps).rsqrt_()).mul_(weight)
    if weight.ndim == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps) * weight


def _add_linear(residual: torch.Tensor, x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    if linear.bias is not None:
        return residual + linear(x)
    return torch.addmm(residual, x, linear.weight.t())


def join_linears(
    owner: nn.Module, name: str, linears: tuple[nn.Linear, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and bias for all, of which theirs become views."""
    weight = torch.cat([linear.weight.data for linear in linears])
    if weight.device.type == "cpu":  # as x @ W.T reads it, see loading.py
        weight = weight.t().contiguous().t()
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.data for linear in linears])
        keep_tensor(owner, f"{name}_bias", bias)
    keep_tensor(owner, f"{name}_weight", weight)
    start = 0
    for linear in linears:
        end = start + linear.weight.shape[0]
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


def keep_tensor(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Known to the module, so that it moves with it, but no part of a checkpoint."""
    owner.register_buffer(f"fused_{name}", tensor, persistent=False)
