"""Weights of a Hugging Face module under the names they have in a Hugging Face checkpoint.

Both are the same for dense models. Transformers keeps the experts of a MoE layer fused in one 3-D
parameter while checkpoints (and SGLang) hold one matrix per expert, in some families under other
names; `hf_views` splits each fused parameter into views under the checkpoint's names. Views share
memory with the parameter, so writing to them updates the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

_FUSED = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)$")
_FUSED_IN_CHECKPOINT = {"gpt_oss", "llama4", "llama4_text", "granitemoe", "granitemoeshared"}
_DEFAULT_PARTS = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_PARTS = ("w1", "w3", "w2")
_MIXTRAL_LIKE = {"mixtral", "minimax", "minimax_m2", "phimoe", "lfm2_moe"}
_MIXTRAL_RENAME = (".mlp.", ".block_sparse_moe.")
_GRANITE_RENAMES = (
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
)
_RENAMES: dict[str, tuple[tuple[str, str], ...]] = {  # parts of names: (module, checkpoint)
    "mixtral": (_MIXTRAL_RENAME,),
    "minimax": (_MIXTRAL_RENAME,),
    "minimax_m2": (_MIXTRAL_RENAME,),
    "phimoe": (_MIXTRAL_RENAME, (".router.weight", ".gate.weight")),
    "ernie4_5_moe": ((".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
    "granitemoe": _GRANITE_RENAMES,
    "granitemoeshared": _GRANITE_RENAMES,
}


def module_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (module name, tensor) of all that a checkpoint holds.

    These are parameters and persistent buffers (such as a router's correction bias); tied weights come
    once, under the first name.
    """
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def hf_views(
    named: Iterable[tuple[str, torch.Tensor]], *, model_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, view) for every (module name, tensor) of a model of this `model_type`."""
    gate, up, down = _MIXTRAL_PARTS if model_type in _MIXTRAL_LIKE else _DEFAULT_PARTS
    keep_fused = model_type in _FUSED_IN_CHECKPOINT
    for name, tensor in named:
        match = None if tensor.ndim != 3 or keep_fused else _FUSED.match(name)
        if match is None:
            yield _rename(name, model_type), tensor
            continue
        prefix = _rename(match["prefix"], model_type)
        for expert in range(tensor.shape[0]):
            if match["kind"] == "down_proj":
                yield f"{prefix}.{expert}.{down}.weight", tensor[expert]
            else:
                half = tensor.shape[1] // 2
                yield f"{prefix}.{expert}.{gate}.weight", tensor[expert, :half]
                yield f"{prefix}.{expert}.{up}.weight", tensor[expert, half:]


def weight_dtype(module: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight in a model that transformers loads as `dtype`: some stay in float32."""
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if any(part in name for part in kept) else dtype


def _rename(name: str, model_type: str) -> str:
    for module_part, checkpoint_part in _RENAMES.get(model_type, ()):
        name = name.replace(module_part, checkpoint_part)
    return name
