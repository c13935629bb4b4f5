"""How a conversion spreads a model: contiguous stages, at least a layer each, the largest least."""

from itertools import combinations

import pytest

from slime.backends.megatron_utils.conversion.setup import ModelSizes, layout_text, stages


def largest(sizes, counts):
    costs = list(sizes.layers)
    costs[0] += sizes.before
    costs[-1] += sizes.after
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return max(sum(costs[end - n : end]) for end, n in zip(ends, counts, strict=True))


def best_by_trying(sizes, count):
    total = len(sizes.layers)
    cuts = combinations(range(1, total), count - 1)
    ways = [[b - a for a, b in zip((0, *cut), (*cut, total), strict=True)] for cut in cuts]
    return min(largest(sizes, way) for way in ways)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    "sizes",
    [
        ModelSizes(0, (1,) * 7, 0),
        ModelSizes(30, (10,) * 7, 30),
        ModelSizes(5, (3, 3, 20, 20, 20, 20, 20), 6),
    ],
)
def test_largest_stage_is_least(sizes, world_size):
    counts = stages(sizes, world_size)
    assert len(counts) == world_size and sum(counts) == 7 and min(counts) >= 1
    assert largest(sizes, counts) == best_by_trying(sizes, world_size)


def test_more_ranks_than_layers_share_stages():
    assert stages(ModelSizes(0, (1, 1, 1), 0), 8) == [1, 2] or stages(
        ModelSizes(0, (1, 1, 1), 0), 8
    ) == [2, 1]
    assert len(stages(ModelSizes(0, (1, 1, 1), 0), 9)) == 3


def test_layout_in_megatrons_letters():
    assert layout_text([2, 3, 1]) == "Ett|ttt|tL"
    assert layout_text([1]) == "EtL"
