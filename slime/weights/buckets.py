"""Weights under Hugging Face names, cast and packed into the buckets that are sent to engines.

A module's names and a checkpoint's are the same for dense models. Transformers keeps the experts of
a MoE layer fused in one 3-D parameter while checkpoints (and SGLang) hold one matrix per expert, in
some families under other names; `hf_views` splits each fused parameter into views under the
checkpoint's names. Views share memory with the parameter, so writing to them updates the model.
`hf_buckets` of each backend gathers the tensors and cuts them into buckets with `batches`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import torch

from slime.config.checks.file_checks import weight_names, weight_shapes
from slime.config.peft_files import nested_name
from slime.utils.device import current_device
from slime.weights.ipc import aligned

NamedTensor = tuple[str, torch.Tensor]
NamedCast = tuple[str, torch.Tensor, torch.dtype]  # name, tensor, dtype to cast it to
HFTensors = Iterable[NamedTensor]
# Name, dtype, shape and offset, as /update_weights_from_tensor takes them.
TensorMetadata = dict[str, Any]


Item = TypeVar("Item")


@dataclass(kw_only=True, frozen=True)
class Bucket:
    """Whole tensors by Hugging Face name, in the dtype the engines hold.

    `index` counts the buckets of one update from 0.
    """

    index: int
    tensors: list[NamedTensor]

    @cached_property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    @cached_property
    def packed_nbytes(self) -> int:
        """The size of a buffer that holds all tensors, each at an aligned offset."""
        return sum(aligned(tensor.nbytes) for _, tensor in self.tensors) or aligned(1)


@dataclass(frozen=True)
class CastBucket:
    """Tensors that are still to be cast, so that the cast can write into the buffer that is sent.

    Iterating over it casts into new memory: `for name, tensor in bucket`.
    """

    tensors: Sequence[NamedCast]

    def __iter__(self) -> Iterator[NamedTensor]:
        return iter(self.cast())

    @property
    def must_be_cast(self) -> bool:
        device = current_device()
        return any(t.dtype != dtype or t.device != device for _, t, dtype in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """The size of the buffer that `cast` fills."""
        return sum(aligned(tensor.numel() * dtype.itemsize) for _, tensor, dtype in self.tensors)

    def cast(self, buffer: torch.Tensor | None = None) -> list[NamedTensor]:
        """Cast all tensors into `buffer` (uint8, at least `nbytes` long) or into new memory.

        The result is on the device of this process; parameters may be offloaded. Tensors of equal types
        are cast together, which is cheaper than one by one. If no tensor needs a cast, all are
        returned as they are and the buffer is not used.
        """
        if not self.must_be_cast:
            return [(name, tensor) for name, tensor, _ in self.tensors]
        if buffer is None:
            buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=current_device())
        targets = self._views(buffer[: self.nbytes])
        casts = [(tensor.dtype, dtype) for _, tensor, dtype in self.tensors]
        for cast in set(casts):
            chosen = [index for index, other in enumerate(casts) if other == cast]
            sources = [self.tensors[index][1] for index in chosen]
            torch._foreach_copy_([targets[index] for index in chosen], sources)  # pyright: ignore[reportPrivateImportUsage]
        return [(name, view) for (name, _, _), view in zip(self.tensors, targets, strict=True)]

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Split the buffer once per dtype: one slice per tensor costs more than its part of the copy."""
        sizes = [aligned(tensor.numel() * dtype.itemsize) for _, tensor, dtype in self.tensors]
        splits = {
            dtype: buffer.view(dtype).split([size // dtype.itemsize for size in sizes])
            for dtype in {dtype for _, _, dtype in self.tensors}
        }
        views = []
        for index, (_, tensor, dtype) in enumerate(self.tensors):
            view = splits[dtype][index]
            if view.numel() > tensor.numel():
                view = view[: tensor.numel()]
            views.append(view.view_as(tensor))
        return views


def batches(
    items: Iterable[Item], size_of: Callable[[Item], int], limit: int, *, keep: bool = True
) -> Iterator[list[Item]]:
    """Yield the items in order, in lists of at most `limit` bytes or of one larger item: the buckets of an update.

    With `keep=False` the lists are as many, but empty.
    """
    batch: list[Item] = []
    size = 0
    for item in items:
        nbytes = size_of(item)
        if size and size + nbytes > limit:
            yield batch
            batch, size = [], 0
        size += nbytes
        if keep:
            batch.append(item)
    if size:
        yield batch


def pack(bucket: Bucket, buffer: torch.Tensor) -> list[TensorMetadata]:
    """Copy the tensors into the buffer, unless all are there already, and return their offsets."""
    start, size = buffer.data_ptr(), buffer.numel()
    offsets = [tensor.data_ptr() - start for _, tensor in bucket.tensors]
    inside = [
        0 <= offset <= size - tensor.nbytes
        for offset, (_, tensor) in zip(offsets, bucket.tensors, strict=True)
    ]
    if all(inside):
        return [
            _metadata(name, tensor, offset)
            for offset, (name, tensor) in zip(offsets, bucket.tensors, strict=True)
        ]
    metadata, targets, sources, offset = [], [], [], 0
    for (name, tensor), is_inside in zip(bucket.tensors, inside, strict=True):
        target = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        targets.append(target)
        sources.append(tensor.clone() if is_inside else tensor)
        metadata.append(_metadata(name, tensor, offset))
        offset += aligned(tensor.nbytes)
    torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
    return metadata


def _metadata(name: str, tensor: torch.Tensor, offset: int) -> TensorMetadata:
    dtype = dtype_name(tensor.dtype)
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


_FUSED = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)$")
_FUSED_IN_CHECKPOINT = {"gpt_oss", "llama4", "llama4_text", "granitemoe", "granitemoeshared"}
_STORED_IN_SEVERAL_WAYS = {
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"),
}
_NESTED = "model.language_model."
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


@dataclass(frozen=True, kw_only=True)
class StoredNames:
    """How the names in one family's checkpoints differ from the module's."""

    nested: bool = False  # model.language_model.layers.0 beside a vision tower, not model.layers.0
    fused_experts: bool = False
    transposed: tuple[str, ...] = ()  # fused experts that are stored as [experts, in, out]


def stored_names(folder: str, model_type: str) -> StoredNames:
    """Read the names in a checkpoint of Qwen3.5 or Qwen3-VL: experts are fused in bf16 and not in FP8.

    Qwen3-VL's are published transposed, and written by transformers as its module has them.
    """
    if model_type not in _STORED_IN_SEVERAL_WAYS:
        return StoredNames()
    names = [name for name in weight_names(folder) if name.startswith("model.")]  # no MTP layers
    return StoredNames(
        nested=model_type.endswith("_text") and any(name.startswith(_NESTED) for name in names),
        fused_experts=any(name.endswith(".experts.gate_up_proj") for name in names),
        transposed=_transposed_experts(folder) if model_type.startswith("qwen3_vl") else (),
    )


def _transposed_experts(folder: str) -> tuple[str, ...]:
    """Return the kinds of experts with other shapes than [experts, 2 x size, H] and [experts, H, size]."""
    shapes = weight_shapes(folder)
    hidden = next(shape[1] for name, shape in shapes.items() if "embed_tokens" in name)
    at = {"gate_up_proj": 2, "down_proj": 1}
    return tuple(
        kind
        for kind, axis in at.items()
        if any(n.endswith(f".experts.{kind}") and shapes[n][axis] != hidden for n in shapes)
    )


def hf_views(
    named: Iterable[tuple[str, torch.Tensor]],
    *,
    model_type: str,
    stored: StoredNames = StoredNames(),  # noqa: B008
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, view) for every (module name, tensor) of a model of this `model_type`."""
    gate, up, down = _MIXTRAL_PARTS if model_type in _MIXTRAL_LIKE else _DEFAULT_PARTS
    keep_fused = model_type in _FUSED_IN_CHECKPOINT or stored.fused_experts
    for name, tensor in named:
        if stored.nested:
            name = nested_name(name)
        if name.endswith(tuple(f".experts.{kind}" for kind in stored.transposed)):
            tensor = tensor.transpose(1, 2)
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


def merge_adapter(
    weight: torch.Tensor,  # [out, in], or some rows of it; or some experts [E, out, in]
    lora_a: torch.Tensor,  # [rank, in], or per expert
    lora_b: torch.Tensor,  # [out, rank], or the same rows of it; or per expert
    scaling: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return W + scaling * B A, computed in fp32 and cast once; with B = 0 it equals W."""
    w, a, b = (x.detach().to(current_device(), torch.float32) for x in (weight, lora_a, lora_b))
    if w.ndim == 3:
        a, b = (x.expand(w.shape[0], *x.shape[-2:]) for x in (a, b))
        return torch.baddbmm(w, b, a, alpha=scaling).to(dtype)
    return torch.addmm(w, b, a, alpha=scaling).to(dtype)


def weight_dtype(module: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a weight in a model that transformers loads as `dtype`: some stay in float32."""
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if any(part in name for part in kept) else dtype


def _rename(name: str, model_type: str) -> str:
    for module_part, checkpoint_part in _RENAMES.get(model_type, ()):
        name = name.replace(module_part, checkpoint_part)
    return name
