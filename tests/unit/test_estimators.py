import math

import pytest
import torch

from slime.algorithms.estimators import kl_estimate

KINDS = ["k1", "k2", "k3", "low_var_kl"]


def by_hand(ours, reference, kind):
    ratio = math.exp(reference - ours)
    return {
        "k1": ours - reference,
        "k2": 0.5 * (ours - reference) ** 2,
        "k3": ratio - 1 - math.log(ratio),
        "low_var_kl": min(ratio - 1 - math.log(ratio), 10.0),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_values_token_by_token(kind):
    ours = torch.tensor([-0.1, -2.0, -5.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-0.5, -2.0, -0.3, -1.1], dtype=torch.float64)
    expected = [by_hand(a, b, kind) for a, b in zip(ours.tolist(), reference.tolist(), strict=True)]
    got = kl_estimate(ours, reference, kind)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    assert (kind == "low_var_kl") == (got[2] == 10.0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_mean_over_all_tokens_is_the_divergence(kind):
    logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, reference = logits.log_softmax(-1)
    exact = (ours.exp() * (ours - reference)).sum()
    torch.testing.assert_close((ours.exp() * kl_estimate(ours, reference, kind)).sum(), exact)


@pytest.mark.parametrize(("kind", "slope"), [("k1", 1.0), ("k2", 0.4), ("k3", 1 - math.exp(-0.4))])
def test_slopes(kind, slope):
    ours = torch.tensor(-0.1, dtype=torch.float64, requires_grad=True)
    kl_estimate(ours, torch.tensor(-0.5, dtype=torch.float64), kind).backward()
    assert ours.grad.item() == pytest.approx(slope)


def test_k3_of_a_large_difference_is_not_cut_short():
    """A reference that is e^12 times likelier, as early in training on a far-off model."""
    got = kl_estimate(torch.tensor(-12.5), torch.tensor(-0.5), "k3")
    assert got.item() == pytest.approx(math.exp(12) - 1 - 12, rel=1e-5)


def test_extreme_differences_stay_finite():
    ours, reference = torch.tensor([-500.0, 0.0]), torch.tensor([0.0, -500.0])
    for kind in KINDS:
        assert kl_estimate(ours, reference, kind).isfinite().all()


def test_unknown_kind():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
