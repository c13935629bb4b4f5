import pytest

from slime.core.batches import add_up, prefixed, reduce_metrics
from slime.core.types import MetricSum


def test_sums_add_up_over_parts_that_lack_some():
    parts = [
        {"loss": MetricSum(total=1.0, count=2), "kl": MetricSum(total=3.0, count=1)},
        {"loss": MetricSum(total=0.5, count=1)},
    ]
    assert add_up(parts) == {
        "loss": MetricSum(total=1.5, count=3),
        "kl": MetricSum(total=3.0, count=1),
    }
    assert add_up([]) == {}


def test_ranks_are_weighted_by_what_they_counted():
    ranks = [
        ({"reward": MetricSum(total=0.5 + 0.5, count=2)}, {"gap": 0.1}),
        ({"reward": MetricSum(total=0.8, count=1), "only": MetricSum(total=4, count=2)}, {}),
        ({"nothing": MetricSum(total=0, count=0)}, {"gap": -1.0, "low": -3.0}),
    ]
    expected = {"reward": 1.8 / 3, "only": 2.0, "gap": 0.1, "low": -3.0}
    for sums, maxima in ranks:
        seen = []

        def gather(mine, seen=seen):
            seen.append(mine)
            return ranks

        assert reduce_metrics(sums, maxima, gather=gather) == pytest.approx(expected)
        assert seen == [(sums, maxima)]


def test_prefixed():
    assert prefixed("train", {"loss": 1.0}) == {"train/loss": 1.0}
