"""Activations that a layer saves for its backward pass, in elements per token of one rank.

Counted from what slime's layers save on a GPU. Per token and tensor rank (H hidden, q and kv the
widths of queries and of keys, F the MLP's, all over TP; H over TP under sequence parallelism):

    input of the norm        H        saved for its backward pass
    output of the norm       H        input of the projection; 0 with --recompute-modules layernorm
    projections          q + 2 kv     Megatron: one tensor, of which values are views; FSDP: 0
      with QK norm   q + 2 kv + q     Megatron: queries copied; FSDP: q + kv
    queries after RoPE       q
    keys and values       kv + kv     q + q if the kernel needs as many key heads as query heads;
                                      values count 0 if they are views
    attention's output       q        input of the output projection
    norm, as above         2 H
    gate and up             2 F       silu(gate) * up is recomputed

Attention scores are never materialised. Where cuDNN may compute samples one by one, their outputs are there
twice, alone and packed: one more q, and no repeated keys. An expert saves input, gate and up of every routed token.

Gated attention (Qwen3-Next, Qwen3.5) adds the gate, its sigmoid in fp32 and the gated output: 4 q. A
gated delta net, with v the width of values and m that of queries, keys and values:

    projections           m + v       one tensor: queries, keys, values and gates
    convolution's input     m         a copy; the scan is recomputed from it
    output, norm, gated   3 v

In its backward pass the recomputed scan holds about 22 m at once. In bf16 kernels hold about 10 m. slime's save
queries, keys and values instead of the copy, flash-linear-attention's both (m) and the inverse of each chunk's
system (v / 2, with heads of 128). Layers of both kinds are averaged.

LoRA adds the output of A, i.e. the rank, for every module with an adapter. A module with an adapter saves
its input, so FSDP's MLP then keeps silu(gate) and silu(gate) * up too: 4 F. Its backward pass holds most when
silu(gate) and up get their gradients. By then the down projection has released silu(gate) * up:

    saved               3 F         gate, silu(gate), up
    gradients           3 F         of silu(gate) * up, of silu(gate), of up

which is 2 F more than the layer has saved. The gradient of its output is one more H, which is counted as the
input of a recomputed layer that is also a boundary. Adapters of experts and Megatron's: 6 F, an estimate.

TransformerEngine's layers save the same, but a norm that is fused into a linear layer (all but
those before experts) is not recomputed. In FP8 a linear layer saves its input in one byte per
element in addition to the bf16 activations of others, and silu(gate) * up is saved in one byte too.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.backends.layer_summary import layer_summary
from slime.backends.model_size import AdapterCount
from slime.cli.plan.model_shape import Shape
from slime.cli.plan.rank_layout import Sizes
from slime.config.arguments import Args
from slime.config.installed import is_installed

_FP8_SHARE = 0.5  # one byte, of an element of two bytes
_SCAN = 22  # of the width of its input: the intermediate results of a gated delta net
_KERNEL_SCAN = 10  # the same by the kernels of slime or flash-linear-attention


@dataclass(frozen=True, kw_only=True)
class SavedPerLayer:
    """Elements per token of one layer; `boundary` is what remains if the layer is recomputed."""

    boundary: float
    attention: float
    mlp: float

    @property
    def total(self) -> float:
        return self.boundary + self.attention + self.mlp


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    dense: SavedPerLayer
    moe: SavedPerLayer
    backward: float  # elements per token that exist at once while a layer's gradient is computed

    @property
    def largest(self) -> float:
        return max(self.dense.total, self.moe.total)


def layer_cost(
    args: Args,
    shape: Shape,
    sizes: Sizes,
    *,
    repeats_keys: bool,
    long_samples: bool = False,  # which cuDNN may compute, one by one
    adapters: AdapterCount | None = None,
) -> LayerCost:
    megatron = args.train_backend == "megatron"
    sp = sizes.tp if megatron and args.sequence_parallel else 1
    hidden = shape.hidden / sp
    recomputed, te = _recomputed(args), uses_te(args)
    fp8 = _FP8_SHARE if te and args.fp8_format else 0.0
    normed = hidden * (fp8 or 1.0)  # what a linear layer saves of the norm's output
    norms = 0.0 if "layernorm" in recomputed and not te else normed
    kernels = args.precision == "bf16"  # of delta nets, on a GPU
    options = {"megatron": megatron, "repeats_keys": repeats_keys, "long_samples": long_samples}
    attention = norms + _mixer(shape, sizes, **options)
    if kernels and is_installed("fla"):
        linear = shape.delta_qkv + shape.delta_values / 2
        attention += shape.delta_share * linear / sizes.tp
    attention += fp8 * shape.heads * (shape.v_dim or shape.head_dim) / sizes.tp
    before_mlp = hidden + norms  # the norm before it: in and out
    before_moe = hidden + (0.0 if "layernorm" in recomputed else hidden)
    dense = 0.0 if "mlp" in recomputed else before_mlp + (2 + fp8) * shape.ffn / sizes.tp
    moe = 0.0 if "moe" in recomputed else before_moe + _experts(shape, sizes, sp, recomputed, fp8)
    if shape.post_norms:
        dense += 2 * hidden
    if adapters is not None:
        attention += adapters.modules * adapters.rank
        dense += 2 * shape.ffn if adapters.in_mlp and not megatron else 0.0
    scan = (_KERNEL_SCAN if kernels else _SCAN) * shape.delta_qkv / sizes.tp
    widest = max(shape.ffn / sizes.tp, shape.experts_per_token * shape.expert_ffn / sp)
    if adapters is None:
        working = 4 * widest + 2 * shape.hidden
    elif megatron or shape.num_experts:
        working = 6 * widest + 2 * shape.hidden
    else:
        working = (2 if adapters.in_mlp else 4) * widest
    return LayerCost(
        dense=SavedPerLayer(boundary=hidden, attention=attention, mlp=dense),
        moe=SavedPerLayer(
            boundary=hidden, attention=attention, mlp=moe if shape.num_experts else 0
        ),
        backward=max(working, scan + 2 * shape.hidden),
    )


def uses_te(args: Args) -> bool:
    """Return whether flags and installed packages select TransformerEngine's layers."""
    if args.train_backend != "megatron":
        return False
    if args.transformer_impl:
        return args.transformer_impl == "transformer_engine"
    wanted = args.fp8_format is not None or is_installed("transformer_engine")
    return args.precision == "bf16" and wanted


def layers_line(args: Args, shape: Shape) -> str:
    return layer_summary(
        te=uses_te(args),
        attention=args.attention_backend or "auto",
        experts=bool(shape.num_experts),
        post_norms=shape.post_norms,
        fp8=(args.fp8_format, args.fp8_recipe) if args.fp8_format else None,
        delta_nets=bool(shape.delta_share),
    )


def _recomputed(args: Args) -> set[str]:
    if args.train_backend == "fsdp" or args.recompute_granularity != "selective":
        return set()
    return set(args.recompute_modules or ["core_attn"])


def _mixer(
    shape: Shape, sizes: Sizes, *, megatron: bool, repeats_keys: bool, long_samples: bool
) -> float:
    """Return the elements of attention or, averaged over the layers, of a hybrid model's two kinds."""
    full = _attention(shape, sizes, megatron=megatron, repeats_keys=repeats_keys)
    if long_samples and not shape.latent and sizes.cp == 1:
        one_by_one = _attention(shape, sizes, megatron=megatron, repeats_keys=False)
        full = max(full, one_by_one + shape.heads * shape.head_dim / sizes.tp)
    if not shape.delta_share:
        return full
    gated = full + 4 * shape.heads * shape.head_dim / sizes.tp
    linear = (2 * shape.delta_qkv + 4 * shape.delta_values) / sizes.tp
    return shape.delta_share * linear + (1 - shape.delta_share) * gated


def _attention(shape: Shape, sizes: Sizes, *, megatron: bool, repeats_keys: bool) -> float:
    if shape.latent:
        return _latent_attention(shape, sizes)
    q = shape.heads * shape.head_dim / sizes.tp
    kv = max(shape.kv_heads / sizes.tp, 1) * shape.head_dim
    values_are_views = megatron and not repeats_keys and sizes.cp == 1
    projections = 0.0
    if shape.qk_norm:
        projections = 2 * q + 2 * kv if megatron else q + kv
    elif values_are_views:
        projections = q + 2 * kv
    each = q if repeats_keys else kv
    # With context parallelism: keys of all ranks that this rank's queries attend to.
    keys = each * (sizes.cp + 0.5 if sizes.cp > 1 else 1)
    values = 0.0 if values_are_views else keys
    log_sums = shape.heads / sizes.tp * 2  # fp32, in elements of two bytes
    return projections + q + keys + values + q + log_sums


def _latent_attention(shape: Shape, sizes: Sizes) -> float:
    """Return the elements of MLA: two latents, their norms, and full queries, keys and values."""
    heads = shape.heads / sizes.tp
    latents = 2 * (shape.q_lora + shape.kv_lora) + shape.rope_dim
    wide = heads * (shape.qk_dim + shape.qk_nope + shape.v_dim)  # outputs of the projections
    assembled = heads * (2 * shape.qk_dim + 2 * shape.v_dim)
    return latents + wide + assembled


def _experts(shape: Shape, sizes: Sizes, sp: int, recomputed: set[str], fp8: float) -> float:
    sent = shape.experts_per_token / sp * sizes.etp  # routed to this rank, with balanced experts
    inner = 0 if "moe_act" in recomputed else (2 + fp8) * shape.expert_ffn / sizes.etp
    each = shape.hidden * (fp8 or 1.0) + inner
    router = 3 * 2 * shape.num_experts / sp  # scores and probabilities in fp32
    shared = 0.0 if "shared_experts" in recomputed else (3 + fp8) * shape.shared_ffn / sizes.tp
    return sent * each + router + shared
