"""Integer checksums of tensors that add up over shards and catch swapped or transposed contents.

The sum of a tensor is  sum_i bits(x_i) * (hash(name) + K * i)  modulo 2**64, with bits(x_i) the
element's bit pattern and i its flat position in the Hugging Face tensor. A shard that starts at flat
position s contributes its part of the sum, so parts from several ranks may simply be added. Integer
arithmetic makes the result independent of the order of summation, of device and of library.
"""

from __future__ import annotations

import hashlib

import torch

_POSITION_FACTOR = 0x9E3779B97F4A7C15  # odd: a change at any position changes the sum
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22


def tensor_checksum(name: str, tensor: torch.Tensor, start: int = 0) -> int:
    """Checksum of the elements of HF tensor `name` from flat position `start` on."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    plain, positional = 0, 0
    for chunk_start in range(0, bits.numel(), _CHUNK):
        chunk = bits[chunk_start : chunk_start + _CHUNK]
        chunk_plain, chunk_positional = _sums(chunk)
        plain += chunk_plain
        positional += chunk_positional + (start + chunk_start) * chunk_plain
    name_hash = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return (plain * name_hash + positional * _POSITION_FACTOR) % 2**64


def format_checksum(value: int) -> str:
    return f"{value:016x}"


def _sums(chunk: torch.Tensor) -> tuple[int, int]:
    """sum_i b_i and sum_i i * b_i of one chunk; int64 wraps around, which is what modulo 2**64 means."""
    wide = chunk.to(torch.int64)
    position = torch.arange(wide.numel(), device=wide.device, dtype=torch.int64)
    plain, positional = torch.stack([wide.sum(), (wide * position).sum()]).tolist()
    return plain, positional
