"""Checksums of many tensors in one launch, against the definition of slime/weights/checksum.py.

On a GPU, or in Triton's interpreter with TRITON_INTERPRET=1, as tests/integration/test_engine_triton.py does.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not INTERPRETED:
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.weights.checksum import tensor_checksum, tensor_checksums  # noqa: E402
from slime.weights.checksum_kernel import many_sums  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = [1, 3, 1024, 16384, 16385, 100_001, 0, 7]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "at odd addresses"])
def test_sums_are_those_of_the_definition(dtype: torch.dtype, shift: int):
    torch.manual_seed(0)
    info = torch.iinfo(dtype)
    tensors = [
        torch.randint(info.min, info.max, (shift + size,), dtype=dtype, device=DEVICE)[shift:]
        for size in SIZES
    ]
    tensors += [torch.full((20_000,), value, dtype=dtype, device=DEVICE) for value in _ends(info)]
    for tensor, found in zip(tensors, many_sums(tensors, dtype).tolist(), strict=True):
        assert found == _defined(tensor.tolist())


def _ends(info: torch.iinfo) -> list[int]:
    return [info.min, info.max]


def _defined(values: list[int]) -> list[int]:
    sums = [sum(values), sum(place * value for place, value in enumerate(values))]
    return [(value + 2**63) % 2**64 - 2**63 for value in sums]


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_model_of_several_types_sums_as_on_a_cpu():
    torch.manual_seed(0)
    named = [
        ("a.weight", torch.randn(300, 70).bfloat16()),
        ("a.scale", torch.randn(5)),
        ("b.weight", torch.randn(64, 64).to(torch.float8_e4m3fn)),
        ("b.steps", torch.arange(9)),
        ("turned", torch.randn(40, 30).bfloat16().T),
    ]
    found = tensor_checksums([(name, tensor.cuda()) for name, tensor in named])
    assert found == {name: tensor_checksum(name, tensor) for name, tensor in named}
