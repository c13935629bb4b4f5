"""SGLang's checksum of a tensor on a GPU, in plain torch: SGLang need not be installed with the trainer.

Words of 32 bits are mixed with their position and summed over tiles of 8192; the mixed sums of the
tiles are summed again. On a CPU SGLang uses SHA-256 instead.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_TILE = 8192  # words
_CHUNK_TILES = 512  # at once: 4 Mi words
_SEED = 0x243F6A88
# For each half of the result: factor of the position, its rotation, seed.
_HALVES = (
    (0x27D4EB2D, 15, _SEED),
    (0x165667B1, 13, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD),
)


@torch.no_grad()
def gpu_hash(tensor: torch.Tensor) -> int:
    """Return the checksum, an unsigned 64-bit integer; works on any device."""
    words = _words(tensor)
    total = 0
    for start in range(0, words.numel(), _TILE * _CHUNK_TILES):
        chunk = words[start : start + _TILE * _CHUNK_TILES]
        total += _sum_of_tiles(chunk, start, 4 * words.numel())
    return _splitmix(total) if words.numel() else 0


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    return flat.view(torch.int32)


def _sum_of_tiles(words: torch.Tensor, start: int, nbytes: int) -> int:
    place = torch.arange(start, start + words.numel(), device=words.device) & _WORD
    value = words.long() & _WORD
    halves = []
    for factor, turn, seed in _HALVES:
        mixed = _mix(value ^ ((place * factor + seed) & _WORD) ^ _rotate(place, turn))
        rows = torch.nn.functional.pad(mixed, (0, -mixed.numel() % _TILE)).view(-1, _TILE)
        halves.append(_mix((rows.sum(1) & _WORD) ^ (nbytes & _WORD)))
    return int(((halves[0] << 32) | halves[1]).sum()) % 2**64  # sums wrap around


def _mix(word: torch.Tensor) -> torch.Tensor:
    word = word ^ (word >> 16)
    word = (word * 0x85EBCA6B) & _WORD
    word = word ^ (word >> 13)
    word = (word * 0xC2B2AE35) & _WORD
    return word ^ (word >> 16)


def _rotate(word: torch.Tensor, turn: int) -> torch.Tensor:
    return ((word << turn) | (word >> (32 - turn))) & _WORD


def _splitmix(value: int) -> int:
    value %= 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)
