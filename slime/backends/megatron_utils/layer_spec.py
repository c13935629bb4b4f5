"""Specs of megatron's layers: their modules with TransformerEngine and without.

With it, linear layers, norms and experts are TransformerEngine's. Attention is torch's
variable-length kernel either way, which supports packed samples in every precision, unless
--attention-backend names a backend of TransformerEngine.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.layer_summary import layer_summary
from slime.backends.megatron_utils.attention import PackedAttention
from slime.backends.megatron_utils.config_classes import GptConfig
from slime.backends.megatron_utils.layers.grouped_experts import GroupedExperts
from slime.backends.megatron_utils.layers.latent_attention import use_latent_projections
from slime.backends.megatron_utils.layers.packed_rotary import uses_te_attention
from slime.backends.megatron_utils.layers.post_norm import PostNormLayer


class RMSNorm(torch.nn.Module):
    """RMSNorm like megatron's, with support for sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        # Each rank has its sequence shard, so gradients are summed over the tensor ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layer specs of one model chunk of this pipeline rank."""
    te = config.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=te,
        normalization=None if te else "RMSNorm",
        vp_stage=vp_stage,
    )
    assert spec.layer_specs is not None, "one per layer of the chunk"
    own: dict[int, ModuleSpec] = {}
    for layer in spec.layer_specs:
        if id(layer) not in own:
            own[id(layer)] = _with_own_modules(copy.deepcopy(layer), config, te=te)
    layers = [own[id(layer)] for layer in spec.layer_specs]
    norm: Any = spec.layer_norm if te else RMSNorm  # a class; megatron-core's annotation lacks it
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def layers_line(config: TransformerConfig) -> str:
    """Return a summary of the layers that `block_spec` builds, for the log."""
    te = config.transformer_impl == "transformer_engine"
    backend = config.attention_backend.name
    return layer_summary(
        te=te,
        attention=backend,
        experts=bool(config.num_moe_experts),
        post_norms=isinstance(config, GptConfig) and config.post_norms,
        fp8=(str(config.fp8), str(config.fp8_recipe)) if config.fp8 else None,
        te_flash=backend == "flash" and uses_te_attention(config),
    )


def _with_own_modules(layer: ModuleSpec, config: TransformerConfig, *, te: bool) -> ModuleSpec:
    parts: Any = layer.submodules
    if isinstance(config, GptConfig) and config.post_norms:
        layer.module = PostNormLayer
        layer.params = {**layer.params, "post_norm": RMSNorm}
    attention = parts.self_attention.submodules
    if not uses_te_attention(config):
        attention.core_attention = PackedAttention
    if te:
        return layer
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.multi_latent_attention:
        use_latent_projections(attention)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, None) not in (None, IdentityOp):
            setattr(attention, name, RMSNorm)
    if parts.mlp.module is MoELayer:
        parts.mlp.submodules.experts.module = GroupedExperts
    return layer
