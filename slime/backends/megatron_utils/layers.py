"""The layers that slime replaces in megatron's model, and the specs that select them.

With TransformerEngine, linear layers, norms and experts are TransformerEngine's. Attention is
torch's variable-length kernel either way, which supports packed samples in every precision, unless
--attention-backend names a backend of TransformerEngine.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from slime.backends.kernels.fused_ops import rms_norm, zero_centered_norm
from slime.backends.layer_summary import layer_summary
from slime.backends.megatron_utils.attention import PackedAttention, uses_te_attention
from slime.backends.megatron_utils.delta_net import GatedAttention, PackedDeltaNet
from slime.backends.megatron_utils.mlp import GroupedExperts


@dataclass
class GptConfig(TransformerConfig):
    """megatron-core's config with the fields that it lacks."""

    post_norms: bool = False  # norms after attention and MLP too
    # Megatron's attention multiplies cosine and sine by 1 + 0.1 * yarn_mscale * log of this factor.
    yarn_rotary_scaling_factor: float = math.e
    yarn_mscale: float = 0.0
    yarn_mscale_all_dim: float = 0.0


def yarn_mscale(attention_factor: float) -> float:
    """Return the `yarn_mscale` with which Megatron scales cosine and sine by `attention_factor`."""
    return 10.0 * (attention_factor - 1.0)


def block_spec(
    config: TransformerConfig, vp_stage: int | None, *, split_norms: bool = False
) -> TransformerBlockSubmodules:
    """Return the layer specs of one model chunk of this pipeline rank.

    With `split_norms` no norm is fused into a linear layer, whose input adapters need.
    """
    te = config.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=te,
        normalization=None if te else "RMSNorm",
        vp_stage=vp_stage,
    )
    assert spec.layer_specs is not None, "one per layer of the chunk"
    own: dict[tuple[int, bool], ModuleSpec] = {}
    layers = []
    for number, layer in zip(_layer_numbers(config, vp_stage), spec.layer_specs, strict=True):
        key = id(layer), is_linear(config, number)
        if key not in own:
            own[key] = _with_own_modules(copy.deepcopy(layer), config, te=te, linear=key[1])
            if te and split_norms:
                _split_norms(own[key])
        layers.append(own[key])
    norm: Any = spec.layer_norm if te else RMSNorm  # a class; megatron-core's annotation lacks it
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def is_linear(config: TransformerConfig, number: int) -> bool:
    """Return whether a layer, numbered from 0, has linear attention: a gated delta net."""
    pattern = config.linear_attention_freq
    return isinstance(pattern, list) and bool(pattern[number])


def _layer_numbers(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """Return the numbers, from 0, of the layers of one model chunk of this pipeline rank."""
    layout: Any = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


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
        delta_nets=config.linear_attention_freq is not None,
    )


def _with_own_modules(
    layer: ModuleSpec, config: TransformerConfig, *, te: bool, linear: bool
) -> ModuleSpec:
    parts: Any = layer.submodules
    if isinstance(config, GptConfig) and config.post_norms:
        layer.module = PostNormLayer
        layer.params = {**layer.params, "post_norm": RMSNorm}
    attention = parts.self_attention.submodules
    if not uses_te_attention(config):
        attention.core_attention = PackedAttention
    if config.attention_output_gate:
        parts.self_attention.module = GatedAttention
    if linear:
        parts.self_attention = _delta_net(attention)
    if te:
        return layer
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.multi_latent_attention:
        _use_latent_projections(attention)
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, None) not in (None, IdentityOp):
            setattr(attention, name, LatentNorm if config.multi_latent_attention else RMSNorm)
    if parts.mlp.module is MoELayer:
        parts.mlp.submodules.experts.module = GroupedExperts
    return layer


def _delta_net(attention: Any) -> ModuleSpec:
    """Return the spec of a gated delta net with the linear layers of this spec of attention.

    The norm of its output is not zero-centred, whatever the other norms are.
    """
    return ModuleSpec(
        module=PackedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=attention.linear_qkv,
            out_norm=ModuleSpec(module=RMSNorm, params={"zero_centered": False}),
            out_proj=attention.linear_proj,
        ),
    )


def _split_norms(layer: ModuleSpec) -> None:
    """Replace TransformerEngine's linear layers with a norm by a norm and a linear layer."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
    )

    parts: Any = layer.submodules
    attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
    for owner, linear, place, norm in (
        (attention, "linear_qkv", parts, "input_layernorm"),
        (attention, "in_proj", parts, "input_layernorm"),
        (attention, "linear_q_up_proj", attention, "q_layernorm"),
        (attention, "linear_kv_up_proj", attention, "kv_layernorm"),
        (mlp, "linear_fc1", parts, "pre_mlp_layernorm"),
    ):
        if getattr(owner, linear, None) is TELayerNormColumnParallelLinear:
            setattr(owner, linear, TEColumnParallelLinear)
            setattr(place, norm, TENorm)


class RMSNorm(torch.nn.Module):
    """RMSNorm like megatron's, with support for sequence parallelism.

    A zero-centred norm multiplies by 1 + weight.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        zero_centered: bool | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        centered = config.layernorm_zero_centered_gamma if zero_centered is None else zero_centered
        self._norm = zero_centered_norm if centered else rms_norm
        device = torch.cuda.current_device()
        weight = torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        # Each rank has its sequence shard, so gradients are summed over the tensor ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.eps)


class LatentNorm(RMSNorm):
    """The norm of a latent of MLA, whose epsilon is 1e-6 whatever that of the layers is.

    DeepSeek's code and transformers leave it at the default of the class.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class LatentProjection(torch.nn.Module):
    """A down projection of multi-head latent attention (MLA), replicated.

    megatron-core's own layers shard the down projections over the tensor ranks. Each rank then uses
    the full RoPE key for its heads, but gets only its own share of the gradient. Here, as in
    TransformerEngine, the projections are replicated, each rank applies them to its sequence shard,
    and their gradients are summed.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


def _use_latent_projections(attention: Any) -> None:
    """Put `LatentProjection` into the spec of a layer's attention.

    megatron-core 0.16.1 treats its placeholders for TransformerEngine's classes as classes, and
    accepts an unsharded module only as `Linear`.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    multi_latent_attention.Linear = LatentProjection
    attention.linear_q_down_proj = attention.linear_kv_down_proj = LatentProjection


class PostNormLayer(TransformerLayer):
    """A layer with norms after attention and MLP too, before each is added to the residual (GLM4).

    `post_norm` is a module given in the params of the layer spec.
    """

    def __init__(self, *args: Any, post_norm: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.post_self_attn_layernorm = self._norm(post_norm)
        self.post_mlp_layernorm = self._norm(post_norm)
        self.self_attn_bda = _with_norm(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = _with_norm(self.post_mlp_layernorm, self.mlp_bda)

    def _norm(self, module: Any) -> torch.nn.Module:
        config = self.config
        norm = build_module(
            module, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )
        return cast(torch.nn.Module, norm)


def _with_norm(norm: torch.nn.Module, add: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's bias-dropout-add so that it normalizes the output first."""

    def prepare(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        add_to_residual = add(training, fused)

        def run(output_with_bias: Any, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = output_with_bias
            output = norm(output if bias is None else output + bias)
            return add_to_residual((output, None), residual, dropout)

        return run

    return prepare


class ValueHead(torch.nn.Module):
    """A linear layer from hidden states to values, zero at first, replicated on tensor ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        weight = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [T, H] to [T]."""
        return (hidden @ self.weight.t()).squeeze(1).float()
