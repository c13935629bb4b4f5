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
from transformers import PreTrainedModel

from slime.engine.kernels.interface import (
    AdapterRows,
    Heads,
    Kernels,
    MoeKernels,
    QueryKeyNorm,
    Rotary,
    Tokens,
)
from slime.engine.kv_cache import KVCache, LayerShape
from slime.engine.models.fused_weights import Projection, register_tensor
from slime.engine.models.hybrid_layers import (
    DeltaNet,
    Forward,
    GatedAttention,
    SharedExpertMoe,
    is_hybrid,
    spread_rotary,
)

if TYPE_CHECKING:
    from slime.engine.lora.bank import LoraBank

_ROPE_CHUNK = 4096
# MoE layers whose router is softmax, then top-k.
_KNOWN_MOE = ("Qwen3MoeSparseMoeBlock", "Qwen3VLMoeTextSparseMoeBlock")


class FastModel:
    def __init__(
        self,
        model: PreTrainedModel,
        kernels: Kernels,
        context_len: int,
        lora: LoraBank | None = None,
    ) -> None:
        body: Any = text_model(model)
        hybrid = is_hybrid(model)
        self.kernels = kernels
        self._embedding: Any = model.get_input_embeddings().weight
        self._head: Any = model.get_output_embeddings()
        self._norm = _Norm(body.norm, kernels, zero_centred=hybrid)
        pairs = body.rotary_emb.inv_freq.shape[-1] if hybrid else None
        self._layers = [_Layer(layer, kernels, lora, pairs) for layer in body.layers]
        self._rotary = _make_rotary(body, model, context_len)
        self._axes = _rope_axes(body, model) if body is not model.model else None

    @property
    def layers(self) -> dict[int, LayerShape]:
        """Return what each attention layer stores in the KV cache."""
        attending = [x.mixer for x in self._layers if not isinstance(x.mixer, DeltaNet)]
        return {
            mixer.index: LayerShape(
                num_heads=mixer.heads.num_key, key_dim=mixer.heads.dim, value_dim=mixer.heads.dim
            )
            for mixer in attending
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
        images, rotary = tokens.images, self._rotary
        if images is not None:
            hidden.index_copy_(0, images.at, images.embeddings)
        if tokens.rope is not None:
            rotary = self._gather_rotary(tokens.rope)
            tokens.angles = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)
        forward = Forward(tokens=tokens, cache=cache, table=table, rotary=rotary)
        for number, layer in enumerate(self._layers):
            delta = layer(hidden, delta, forward)
            if images is not None and number < len(images.deepstack):
                hidden.index_add_(0, images.at, images.deepstack[number])
        if outputs is not None:
            hidden = hidden.index_select(0, outputs)
            delta = None if delta is None else delta.index_select(-2, outputs)
        normed = self._norm(hidden, delta)
        return F.linear(normed, self._head.weight, self._head.bias)

    def _gather_rotary(self, positions: torch.Tensor) -> Rotary:
        """Return RoPE for positions [T, 3]: each dimension of a head uses one of the three."""
        assert self._axes is not None, "a model without a vision tower"
        rows, table = positions.index_select(1, self._axes), self._rotary  # [T, dim]
        return Rotary(cosines=table.cosines.gather(0, rows), sines=table.sines.gather(0, rows))


class _Norm:
    """The weight of an RMSNorm; models with gated delta nets store it minus one."""

    def __init__(self, norm: Any, kernels: Kernels, *, zero_centred: bool) -> None:
        self._weight, self._kernels = norm.weight, kernels
        self._eps: float = norm.eps if zero_centred else norm.variance_epsilon
        self._zero_centred = zero_centred

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        """Add `delta` to `hidden` in place; return the norm of it."""
        return self._kernels.add_rms_norm(
            hidden, delta, self._weight, self._eps, self._zero_centred
        )


class _Layer:
    """`pairs`: how many pairs of dimensions RoPE rotates, in models with gated delta nets."""

    def __init__(
        self, layer: Any, kernels: Kernels, lora: LoraBank | None, pairs: int | None
    ) -> None:
        hybrid = pairs is not None
        if pairs is None:
            self.mixer = _Attention(layer.self_attn, kernels, lora)
        elif hasattr(layer, "linear_attn"):
            self.mixer = DeltaNet(layer.linear_attn, kernels, lora)
        else:
            self.mixer = GatedAttention(layer.self_attn, kernels, lora, pairs)
        self._before = _Norm(layer.input_layernorm, kernels, zero_centred=hybrid)
        self._after = _Norm(layer.post_attention_layernorm, kernels, zero_centred=hybrid)
        self._mlp = _make_mlp(layer.mlp, kernels, lora)

    def __call__(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, forward: Forward
    ) -> torch.Tensor:
        """Add `delta`, the output of the layer before, to `hidden` in place; return the output of this layer."""
        delta = self.mixer(self._before(hidden, delta), forward)
        return self._mlp(self._after(hidden, delta), forward.tokens.adapters)


class _Attention:
    def __init__(self, attention: Any, kernels: Kernels, lora: LoraBank | None) -> None:
        self.index: int = attention.layer_idx
        self._kernels = kernels
        self._scale: float = attention.scaling
        self._window: int | None = getattr(attention, "sliding_window", None)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, _ = (p.out_features // attention.head_dim for p in projections)
        self.heads = Heads(num_query=query, num_key=key, dim=attention.head_dim)
        self._qkv = Projection(attention, "qkv", projections, kernels, lora)
        self._out = Projection(attention, "out", (attention.o_proj,), kernels, lora, split_k=True)
        self._qk_norm = _make_qk_norm(attention)

    def __call__(self, normed: torch.Tensor, forward: Forward) -> torch.Tensor:
        kernels, heads, tokens = self._kernels, self.heads, forward.tokens
        pages = forward.pages(self.index)
        qkv = self._qkv(normed, tokens.adapters)
        kernels.rope_store(qkv, tokens, heads, pages, forward.rotary, self._qk_norm)
        attended = kernels.attend(qkv, tokens, heads, pages, self._scale, self._window)
        return self._out(attended, tokens.adapters)


class _GatedMlp:
    def __init__(self, mlp: Any, kernels: Kernels, lora: LoraBank | None) -> None:
        gate_up = (mlp.gate_proj, mlp.up_proj)
        self._gate_up = Projection(mlp, "gate_up", gate_up, kernels, lora)
        self._down = Projection(mlp, "down", (mlp.down_proj,), kernels, lora, split_k=True)
        self._kernels = kernels

    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        base, lora = self._gate_up.base, self._gate_up.lora
        if adapters is None or lora is None:
            active = self._kernels.gated_linear(hidden, *base)
        else:
            active = self._kernels.gated_linear_lora(hidden, base, lora, adapters)
        return self._down(active, adapters)


class _Moe:
    def __init__(self, mlp: Any, kernels: MoeKernels, lora: LoraBank | None) -> None:
        self._router, self._kernels = mlp.gate, kernels
        self._gate_up, self._down = mlp.experts.gate_up_proj, mlp.experts.down_proj
        self._lora = None if lora is None else lora.attach_experts(mlp.experts)

    def __call__(self, hidden: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        router = self._router
        logits = F.linear(hidden, router.weight)
        normalize = getattr(router, "norm_topk_prob", True)
        experts, weights = self._kernels.route(logits, router.top_k, normalize)
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
) -> _GatedMlp | _Moe | _HuggingFaceMoe | SharedExpertMoe:
    if hasattr(mlp, "gate_proj"):
        return _GatedMlp(mlp, kernels, lora)
    if hasattr(mlp, "shared_expert"):
        shared = _GatedMlp(mlp.shared_expert, kernels, lora)
        routed = None if kernels.experts is None else _Moe(mlp, kernels.experts, lora)
        return SharedExpertMoe(mlp, routed, shared, kernels, lora)
    if kernels.experts is None or type(mlp).__name__ not in _KNOWN_MOE:
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


def text_model(model: PreTrainedModel) -> Any:
    """Return the text model, which is nested in models with a vision tower."""
    body: Any = model.model
    return getattr(body, "language_model", body)


@torch.no_grad()
def _rope_axes(body: Any, model: PreTrainedModel) -> torch.Tensor:
    """Return [dim] int64: whether time, row or column rotates a dimension, found by varying one at a time."""
    like = torch.empty(0, dtype=torch.float32, device=body.rotary_emb.inv_freq.device)
    moved = torch.eye(3, dtype=torch.int64, device=like.device)[:, None]  # [3, 1, 3 tokens]
    cosines, sines = body.rotary_emb(like, moved)
    rotary = Rotary(cosines=cosines[0], sines=sines[0])
    if is_hybrid(model):
        rotary = spread_rotary(rotary, body.config.head_dim)
    axes = rotary.sines.abs().argmax(0)
    return register_tensor(body, "axes", axes)


@torch.no_grad()
def _make_rotary(body: Any, model: PreTrainedModel, context_len: int) -> Rotary:
    """Compute RoPE for all positions as Hugging Face does, rounded to the model's dtype."""
    like = torch.empty(0, dtype=model.dtype, device=body.rotary_emb.inv_freq.device)
    cosines: list[torch.Tensor] = []
    sines: list[torch.Tensor] = []
    for start in range(0, context_len + 1, _ROPE_CHUNK):
        end = min(start + _ROPE_CHUNK, context_len + 1)
        positions = torch.arange(start, end, device=like.device)[None]  # [1, T]
        if hasattr(body.rotary_emb, "mrope_section"):
            positions = positions.expand(3, 1, -1)  # transformers before 5.18 only takes [3, 1, T]
        cos, sin = body.rotary_emb(like, positions)
        cosines.append(cos[0])
        sines.append(sin[0])
    rotary = Rotary(cosines=torch.cat(cosines), sines=torch.cat(sines))
    if is_hybrid(model):
        rotary = spread_rotary(rotary, body.config.head_dim)
    register_tensor(body, "cosines", rotary.cosines)
    register_tensor(body, "sines", rotary.sines)
    return rotary
