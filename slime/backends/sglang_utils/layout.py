"""What an SGLang server holds after an update, as its own checksums name it.

SGLang fuses q, k and v, and gate and up, into one parameter each, and pads the vocabulary to a multiple
of 64 with zeros. For dense models in one piece (no tensor parallelism, no quantisation) its checksum of
each parameter can therefore be told in advance from what is sent.
"""

from __future__ import annotations

import hashlib

import torch

_EXACT = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PART = {part: (fused, parts) for fused, parts in _FUSED.items() for part in parts}
_VOCABULARY = ("embed_tokens", "lm_head")
_VOCABULARY_MULTIPLE = 64


def is_exact(architectures: list[str] | None) -> bool:
    """Whether the layout of this model is known to the last bit."""
    return bool(architectures) and set(architectures) <= _EXACT


class ServedSums:
    """Checksums of the parameters as a server holds them, from Hugging Face tensors in any order."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}
        self._parts: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        module, _, rest = name.rpartition(".")
        prefix, _, last = module.rpartition(".")
        if last in _VOCABULARY or module in _VOCABULARY:
            self.sums[name] = _digest([_padded(tensor)])
        elif last in _PART:
            fused, order = _PART[last]
            self._add_part(f"{prefix}.{fused}.{rest}", last, order, tensor)
        else:
            self.sums[name] = _digest([tensor])

    def _add_part(
        self, fused: str, part: str, order: tuple[str, ...], tensor: torch.Tensor
    ) -> None:
        parts = self._parts.setdefault(fused, {})
        parts[part] = tensor.clone()  # the bucket it lies in is used again
        if len(parts) == len(order):
            self.sums[fused] = _digest([parts[one] for one in order])
            del self._parts[fused]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[0] % _VOCABULARY_MULTIPLE
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def _digest(tensors: list[torch.Tensor]) -> str:
    if tensors[0].is_cuda:
        from sglang.srt.managers.mm_utils import tensor_hash  # its kernel, on the GPU

        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return f"{tensor_hash(whole.contiguous()):016x}"
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return total.hexdigest()[:16]
