"""The fast path: the forward of Llama-like models on the engine's own kernels.

Per layer four matmuls and at most five kernels, on the parameters of the Hugging Face modules; query, key
and value are fused into one weight, and so are gate and up::

    hidden ─ add_rms_norm ─ qkv ─ rope_store ─ attend ─ out ─ add_rms_norm ─ gated_linear ─ down ─▶
       ▲                                                │                                     │
       └────────────── added by the next norm ──────────┴─────────────────────────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from slime.engine.kernels.interface import (
    AdapterRows,
    Heads,
    Kernels,
    MoeKernels,
    Pages,
    QueryKeyNorm,
    Rotary,
    Tokens,
)
from slime.engine.kv_cache import KVCache, LayerShape

if TYPE_CHECKING:
    from slime.engine.lora.bank import LoraBank

_ROPE_CHUNK = 4096
_KNOWN_MOE = "Qwen3MoeSparseMoeBlock"  # whose router is softmax, then top-k


class FastModel:
    def __init__(
        self,
        model: PreTrainedModel,
        kernels: Kernels,
        context_len: int,
        lora: LoraBank | None = None,
    ) -> None:
        body: Any = model.model
        self.kernels = kernels
        self._embedding: Any = model.get_input_embeddings().weight
        self._head: Any = model.get_output_embeddings()
        self._norm, self._eps = body.norm.weight, body.norm.variance_epsilon
        self._layers = [_Layer(layer, kernels, lora) for layer in body.layers]
        self._rotary = _make_rotary(body, model.dtype, context_len)

    @property
    def layers(self) -> dict[int, LayerShape]:
        return {
            layer.index: LayerShape(
                num_heads=layer.heads.num_key, key_dim=layer.heads.dim, value_dim=layer.heads.dim
            )
            for layer in self._layers
        }

    def __call__(
        self,
        tokens: Tokens,
        cache: KVCache,
        table: torch.Tensor,
        outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits [R, V] of the tokens with indices `outputs` [R], or of all."""
        hidden = F.embedding(tokens.ids, self._embedding)  # [T, H]
        delta: torch.Tensor | None = None
        for layer in self._layers:
            pages = Pages(
                keys=cache.keys[layer.index], values=cache.values[layer.index], table=table
            )
            delta = layer(hidden, delta, tokens, pages, self._rotary)
        if outputs is not None:
            hidden = hidden.index_select(0, outputs)
            delta = None if delta is None else delta.index_select(-2, outputs)
        normed = self.kernels.add_rms_norm(hidden, delta, self._norm, self._eps)
        return F.linear(normed, self._head.weight, self._head.bias)


class _Layer:
    def __init__(self, layer: Any, kernels: Kernels, lora: LoraBank | None) -> None:
        attention = layer.self_attn
        self.index: int = attention.layer_idx
        self._kernels = kernels
        self._scale: float = attention.scaling
        self._window: int | None = getattr(attention, "sliding_window", None)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, _ = (p.out_features // attention.head_dim for p in projections)
        self.heads = Heads(num_query=query, num_key=key, dim=attention.head_dim)
        self._qkv, self._qkv_bias = _join_linears(attention, "qkv", projections)
        self._qkv_lora = None if lora is None else lora.attach(projections)
        self._out_lora = None if lora is None else lora.attach((attention.o_proj,))
        self._qk_norm = _make_qk_norm(attention)
        self._out, self._out_bias = attention.o_proj.weight, attention.o_proj.bias
        self._before, self._after = (
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
        )
        self._eps: float = layer.input_layernorm.variance_epsilon
        self._mlp = _make_mlp(layer.mlp, kernels, lora)

    def __call__(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        tokens: Tokens,
        pages: Pages,
        rotary: Rotary,
    ) -> torch.Tensor:
        """Add `delta`, the output of the layer before, to `hidden` in place; return the output of this layer."""
        kernels, heads = self._kernels, self.heads
        normed = kernels.add_rms_norm(hidden, delta, self._before, self._eps)
        adapters = tokens.adapters
        qkv = kernels.linear(normed, self._qkv, self._qkv_bias)
        if adapters is not None and self._qkv_lora is not None:
            kernels.add_lora(qkv, normed, self._qkv_lora, adapters)
        kernels.rope_store(qkv, tokens, heads, pages, rotary, self._qk_norm)
        attended = kernels.attend(qkv, tokens, heads, pages, self._scale, self._window)
        delta = kernels.linear_split_k(attended, self._out, self._out_bias)
        if adapters is not None and self._out_lora is not None:
            kernels.add_lora(delta, attended, self._out_lora, adapters)
        normed = kernels.add_rms_norm(hidden, delta, self._after, self._eps)
        return self._mlp(normed, adapters)


class _GatedMlp:
    def __init__(self, mlp: Any, kernels: Kernels, lora: LoraBank | None) -> None:
        self._gate_up, self._bias = _join_linears(mlp, "gate_up", (mlp.gate_proj, mlp.up_proj))
        self._down, self._down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        self._gate_up_lora = None if lora is None else lora.attach((mlp.gate_proj, mlp.up_proj))
        self._down_lora = None if lora is None else lora.attach((mlp.down_proj,))
        self._kernels = kernels

    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        kernels = self._kernels
        if adapters is None or self._gate_up_lora is None:
            active = kernels.gated_linear(hidden, self._gate_up, self._bias)
        else:
            gate_up = kernels.linear(hidden, self._gate_up, self._bias)
            kernels.add_lora(gate_up, hidden, self._gate_up_lora, adapters)
            active = kernels.silu_mul(gate_up)
        delta = kernels.linear_split_k(active, self._down, self._down_bias)
        if adapters is not None and self._down_lora is not None:
            kernels.add_lora(delta, active, self._down_lora, adapters)
        return delta


class _Moe:
    def __init__(self, mlp: Any, kernels: MoeKernels, lora: LoraBank | None) -> None:
        self._router, self._kernels = mlp.gate, kernels
        self._gate_up, self._down = mlp.experts.gate_up_proj, mlp.experts.down_proj
        self._lora = None if lora is None else lora.attach_experts(mlp.experts)

    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        router = self._router
        logits = F.linear(hidden, router.weight)
        experts, weights = self._kernels.route(logits, router.top_k, router.norm_topk_prob)
        matrices = (self._gate_up, self._down)
        return self._kernels.run_experts(hidden, experts, weights, *matrices, self._lora, adapters)


class _HuggingFaceMoe:
    """A MoE layer that runs as its Hugging Face module."""

    def __init__(self, mlp: Any, lora: LoraBank | None) -> None:
        self._mlp, self._lora = mlp, lora
        if lora is not None and hasattr(mlp, "experts"):
            lora.hook_experts(mlp.experts)

    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        if self._lora is not None:
            self._lora.rows = adapters
        output = self._mlp(hidden.unsqueeze(0))
        return (output[0] if isinstance(output, tuple) else output)[0]


def _make_mlp(
    mlp: Any, kernels: Kernels, lora: LoraBank | None
) -> _GatedMlp | _Moe | _HuggingFaceMoe:
    if hasattr(mlp, "gate_proj"):
        return _GatedMlp(mlp, kernels, lora)
    if kernels.experts is None or type(mlp).__name__ != _KNOWN_MOE:
        return _HuggingFaceMoe(mlp, lora)
    return _Moe(mlp, kernels.experts, lora)


def _make_qk_norm(attention: Any) -> QueryKeyNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    return QueryKeyNorm(
        query=attention.q_norm.weight,
        key=attention.k_norm.weight,
        eps=attention.q_norm.variance_epsilon,
    )


@torch.no_grad()
def _make_rotary(body: Any, dtype: torch.dtype, context_len: int) -> Rotary:
    """Compute RoPE for all positions as Hugging Face does, rounded to the model's dtype."""
    like = torch.empty(0, dtype=dtype, device=body.rotary_emb.inv_freq.device)
    cosines: list[torch.Tensor] = []
    sines: list[torch.Tensor] = []
    for start in range(0, context_len + 1, _ROPE_CHUNK):
        end = min(start + _ROPE_CHUNK, context_len + 1)
        cos, sin = body.rotary_emb(like, torch.arange(start, end, device=like.device)[None])
        cosines.append(cos[0])
        sines.append(sin[0])
    rotary = Rotary(cosines=torch.cat(cosines), sines=torch.cat(sines))
    _register_tensor(body, "cosines", rotary.cosines)
    _register_tensor(body, "sines", rotary.sines)
    return rotary


def _join_linears(
    owner: nn.Module, name: str, linears: tuple[nn.Linear, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fuse linears into one weight and bias; theirs become views, so that weight updates write to both."""
    weight = torch.cat([linear.weight.data for linear in linears])
    if weight.device.type == "cpu":  # the memory layout of loading.py
        weight = weight.t().contiguous().t()
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.data for linear in linears])
        _register_tensor(owner, f"{name}_bias", bias)
    _register_tensor(owner, f"{name}_weight", weight)
    start = 0
    for linear in linears:
        end = start + linear.weight.shape[0]
        linear.weight.data = weight[start:end]
        if bias is not None:
            linear.bias.data = bias[start:end]
        start = end
    return weight, bias


def _register_tensor(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a non-persistent buffer, so that the tensor moves with the module."""
    owner.register_buffer(f"fused_{name}", tensor, persistent=False)
