"""Names of a Hugging Face module's parameters as they stand in a Hugging Face checkpoint.

Both are the same for dense models. Transformers keeps the experts of a MoE layer fused in one 3-D
parameter while checkpoints (and SGLang) hold one matrix per expert; here each fused parameter is
given as views of its parts under the checkpoint's names. Views share memory with the parameter, so
writing to them updates the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

_FUSED = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def hf_views(
    named: Iterable[tuple[str, torch.Tensor]], *, fused_in_checkpoint: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, view) for every (module name, tensor)."""
    for name, tensor in named:
        match = _FUSED.match(name)
        if match is None or tensor.ndim != 3 or fused_in_checkpoint:
            yield name, tensor
            continue
        prefix, kind = match["prefix"], match["kind"]
        for expert in range(tensor.shape[0]):
            if kind == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", tensor[expert]
            else:
                half = tensor.shape[1] // 2
                yield f"{prefix}.{expert}.gate_proj.weight", tensor[expert, :half]
                yield f"{prefix}.{expert}.up_proj.weight", tensor[expert, half:]


def keeps_experts_fused(model_type: str) -> bool:
    """Whether checkpoints of this model type hold the experts fused, as the module does."""
    return model_type in {"gpt_oss", "llama4", "llama4_text"}
