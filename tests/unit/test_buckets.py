"""A bucket cast at once: every tensor as it would be alone, one after another in one buffer."""

from __future__ import annotations

import itertools

import pytest
import torch

from slime.weights.buckets import CastBucket

SHAPES = [(7,), (), (64, 2), (0, 4), (3, 5, 2), (32,), (1,)]
TYPES = [torch.bfloat16, torch.float32, torch.float16]


def wanted() -> list[tuple[str, torch.Tensor, torch.dtype]]:
    torch.manual_seed(0)
    return [
        (f"{index}", torch.randn(SHAPES[index % len(SHAPES)]), TYPES[index % len(TYPES)])
        for index in range(20)
    ] + [
        ("turned", torch.randn(6, 4).T, torch.bfloat16),
        ("steps", torch.arange(5), torch.int64),
    ]


@pytest.mark.parametrize("spare", [None, 0, 13], ids=["new memory", "buffer", "larger buffer"])
def test_each_is_what_it_would_be_alone(spare: int | None):
    bucket = CastBucket(wanted())
    buffer = None if spare is None else torch.empty(bucket.nbytes + spare, dtype=torch.uint8)
    cast = bucket.cast(buffer)
    assert [name for name, _ in cast] == [name for name, _, _ in wanted()]
    for (_, place), (_, tensor, dtype) in zip(cast, wanted(), strict=True):
        assert place.dtype == dtype and place.is_contiguous()
        assert torch.equal(place, tensor.to(dtype))
    start = cast[0][1].data_ptr()
    places = [place for _, place in cast if place.numel()]
    assert all((place.data_ptr() - start) % 64 == 0 for place in places), "as a GPU reads fastest"
    for place, following in itertools.pairwise(places):
        assert place.data_ptr() + place.nbytes <= following.data_ptr()
    if buffer is not None:
        assert start == buffer.data_ptr()
        assert places[-1].data_ptr() + places[-1].nbytes <= start + buffer.numel()


def test_what_need_not_be_cast_is_given_as_it_is():
    tensors = [torch.randn(3), torch.randn(2, 2)]
    cast = list(CastBucket([(str(index), t, t.dtype) for index, t in enumerate(tensors)]))
    assert [t.data_ptr() for _, t in cast] == [t.data_ptr() for t in tensors]
