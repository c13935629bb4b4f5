"""What TransformerEngine changes in a plan: the layers, FP8 copies of weights, optimizer dtypes."""

from __future__ import annotations

import math

from slime.backends.layer_summary import layer_summary
from slime.backends.model_size.rank_model import RankModel
from slime.cli.plan.model_shape import Shape
from slime.config.arguments import Args
from slime.config.installed import is_installed

# FP8 matmuls of Hopper read both operands along the summed dimension, so the backward pass needs
# transposed weights: one byte per element each way. Scales, of 128 x 128 or more, are under 0.1 %.
_FP8_COPIES = 2
_BYTES = {"float32": 4, "fp32": 4, "float16": 2, "fp16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1}


def uses_te(args: Args) -> bool:
    """Return whether the layers are TransformerEngine's, by the flags and this machine."""
    if args.train_backend != "megatron":
        return False
    if args.transformer_impl:
        return args.transformer_impl == "transformer_engine"
    wanted = args.fp8_format is not None or is_installed("transformer_engine")
    return args.precision == "bf16" and wanted


def fp8_copy_bytes(args: Args, shape: Shape, rank: RankModel, tp: int) -> int:
    """Return the bytes of the FP8 copies of linear weights, which live from step to step."""
    if not (uses_te(args) and args.fp8_format):
        return 0
    tables = rank.has_embedding + (rank.has_head and not (shape.tied and rank.has_embedding))
    outside = tables * math.ceil(shape.vocab / tp) * shape.hidden
    return _FP8_COPIES * max(rank.parameters - outside, 0)


def optimizer_bytes(args: Args, rank: RankModel) -> tuple[int, int]:
    """Return (master weights, moments) on the GPU, as the precision-aware optimizer keeps them."""
    aware = args.use_precision_aware_optimizer and not args.optimizer_cpu_offload
    if not aware:
        return rank.master_bytes, rank.moment_bytes
    # Of an fp32 master whose upper half is the bf16 weight only the lower 16 bits are kept.
    halved = args.store_param_remainders is not False or _size(args.main_params_dtype) == 2
    master = rank.master_bytes // 2 if halved else rank.master_bytes
    first, second = (_size(args.exp_avg_dtype), _size(args.exp_avg_sq_dtype))
    return master, int(rank.moment_bytes * (first + second) / 8)


def layers_line(args: Args, shape: Shape) -> str:
    return layer_summary(
        te=uses_te(args),
        attention=args.attention_backend or "auto",
        experts=bool(shape.num_experts),
        post_norms=shape.post_norms,
        fp8=(args.fp8_format, args.fp8_recipe) if args.fp8_format else None,
    )


def _size(dtype: object) -> int:
    return 4 if dtype is None else _BYTES.get(str(dtype).removeprefix("torch."), 4)
