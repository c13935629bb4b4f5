import hashlib
from itertools import pairwise

import pytest
import torch

from slime.weights.checksum import format_checksum, tensor_checksum, tensor_checksums

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
]
_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def naive_checksum(name: str, tensor: torch.Tensor, start: int = 0) -> int:
    """The definition, element by element, in Python's unbounded integers."""
    name_hash = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    bits = tensor.contiguous().reshape(-1).view(_INT[tensor.element_size()]).tolist()
    total = sum(b * (name_hash + 0x9E3779B97F4A7C15 * (start + i)) for i, b in enumerate(bits))
    return total % 2**64


def make(numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    if dtype == torch.int64:
        return torch.randint(-(2**62), 2**62, (numel,), generator=generator)
    values = torch.randn(numel, generator=generator)
    return values > 0 if dtype == torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 63, 1023, 1024, 1025, 31 * 1024, 70_001])
def test_equals_the_definition(dtype, numel):
    tensor = make(numel, dtype)
    assert tensor_checksum("model.w", tensor) == naive_checksum("model.w", tensor)


def test_many_at_once_equal_one_by_one():
    named = [(f"w{n}", make(n, dtype)) for n, dtype in [(5, torch.bool), (3000, torch.bfloat16)]]
    assert tensor_checksums(named) == {name: naive_checksum(name, t) for name, t in named}
    assert tensor_checksums([]) == {}


@pytest.mark.parametrize("cuts", [[1], [1024], [999, 5000], [3, 4, 8191]])
def test_shards_add_up(cuts):
    tensor = make(9001, torch.bfloat16)
    bounds = [0, *cuts, 9001]
    parts = [tensor_checksum("w", tensor[a:b], start=a) for a, b in pairwise(bounds)]
    assert sum(parts) % 2**64 == tensor_checksum("w", tensor)


def test_views_of_a_fused_parameter_equal_their_parts():
    fused = make(96 * 64, torch.float32).view(96, 64)
    for part in (fused[32:64], fused.T[5:9], fused[:, ::2]):
        assert tensor_checksum("w", part) == naive_checksum("w", part.clone())


def test_changes_are_caught():
    tensor = make(64 * 48, torch.float32).view(64, 48)
    good = tensor_checksum("w", tensor)
    flipped = tensor.clone()
    flipped.view(torch.int32)[17, 3] ^= 1
    signs = tensor.clone()
    signs[2, 2] *= -1
    signs[2, 4] *= -1
    swapped_rows = tensor[[1, 0, *range(2, 64)]]
    for bad in (flipped, signs, swapped_rows, tensor.T.contiguous(), tensor.flip(0)):
        assert tensor_checksum("w", bad) != good
    assert tensor_checksum("v", tensor) != good, "equal tensors under two names must differ"


def test_negative_zero_and_nan_bits_count():
    zeros = torch.zeros(8)
    assert tensor_checksum("w", zeros) != tensor_checksum("w", -zeros)
    nan = torch.full((8,), float("nan"))
    assert tensor_checksum("w", nan) == tensor_checksum("w", nan.clone())


def test_format_is_16_hex_digits():
    assert format_checksum(255) == "00000000000000ff"
    assert len(format_checksum(2**64 - 1)) == 16
