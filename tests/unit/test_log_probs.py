import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slime.algorithms.log_probs import (
    _fused_grad_logits,
    _fused_statistics,
    log_probs_from_hidden,
)

T, H, V = 13, 6, 11


def tensors(dtype=torch.float64, with_bias=True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, H), (V, H), (V,)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    hidden, weight, bias = (t.requires_grad_() for t in made)
    labels = torch.randint(0, V, (T,), generator=generator)
    return hidden, weight, bias if with_bias else None, labels


def reference(hidden, weight, bias, labels, temperature):
    """log_softmax of the whole [T, V] matrix."""
    log_p = (F.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def gradients(outputs, inputs):
    """Of a sum with a different factor for each position, for log-probs and entropy alike."""
    factors = torch.linspace(-1, 2, T, dtype=torch.float64)
    total = sum((o * f).sum() for o, f in zip(outputs, (factors, factors.flip(0)), strict=False))
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_log_softmax(temperature, chunk_size, with_bias):
    hidden, weight, bias, labels = tensors(with_bias=with_bias)
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    expected = reference(hidden, weight, bias, labels, temperature)
    ours = log_probs_from_hidden(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        chunk_size=chunk_size,
        with_entropy=True,
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(gradients(ours, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_gradient_of_log_probs_alone():
    hidden, weight, _, labels = tensors(with_bias=False)
    log_probs, entropy = log_probs_from_hidden(hidden, weight, labels, chunk_size=5)
    assert entropy is None
    expected, _ = reference(hidden, weight, None, labels, 1.0)
    for a, b in zip(
        gradients([log_probs], [hidden, weight]),
        gradients([expected], [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_gradient_of_entropy_alone():
    hidden, weight, _, labels = tensors(with_bias=False)
    _, ours = log_probs_from_hidden(hidden, weight, labels, chunk_size=5, with_entropy=True)
    _, expected = reference(hidden, weight, None, labels, 1.0)
    ours = torch.autograd.grad(ours.square().sum(), hidden)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), hidden))


def test_frozen_inputs_get_no_gradient():
    hidden, weight, _, labels = tensors(with_bias=False)
    frozen = weight.detach()
    log_probs_from_hidden(hidden, frozen, labels)[0].sum().backward()
    assert hidden.grad is not None and frozen.grad is None


def test_bfloat16_is_summed_in_float32():
    hidden, weight, bias, labels = tensors(torch.bfloat16)
    ours = log_probs_from_hidden(hidden, weight, labels, bias=bias, chunk_size=4, with_entropy=True)
    logits = F.linear(hidden, weight, bias).float()  # the model's dtype is that of the product only
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(ours[0], log_p.gather(1, labels[:, None]).squeeze(1))
    torch.testing.assert_close(ours[1], -(log_p.exp() * log_p).sum(-1))
    assert ours[0].dtype == ours[1].dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = gradients(reference(*wide, bias.detach().double(), labels, 1.0), wide)
    for grad, expected in zip(gradients(ours, [hidden, weight]), exact, strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), expected, rtol=0.05, atol=0.1)


def test_gradients_of_many_chunks_do_not_stall_in_bfloat16():
    """Adding 1 to 256 in bfloat16 gives 256; a sum over hundreds of chunks has to go on."""
    tokens = 600
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.long)
    log_probs, _ = log_probs_from_hidden(hidden, weight, labels, bias=bias, chunk_size=1)
    log_probs.sum().backward()  # each token adds 1 - 1/2 to its label's row and -1/2 to the other's
    for grad in (weight.grad.flatten(), bias.grad):
        torch.testing.assert_close(grad.float(), torch.tensor([300.0, -300.0]), rtol=0.01, atol=0)


def test_logits_beyond_the_range_of_exp():
    """exp(300) is infinite in float32; probabilities are not."""
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.99], [-1.0]], requires_grad=True)
    labels = torch.tensor([1, 1])
    ours = log_probs_from_hidden(hidden, weight, labels, with_entropy=True)
    expected = reference(hidden, weight, None, labels, 1.0)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    ours, expected = (torch.autograd.grad(x[0].sum(), weight)[0] for x in (ours, expected))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernels_of_the_gpu_compute_what_log_softmax_does(temperature):
    """They take over in half precision on a GPU; as written they run anywhere, in any precision."""
    hidden, weight, _, labels = (t if t is None else t.detach() for t in tensors(with_bias=False))
    logits = F.linear(hidden, weight).float().requires_grad_()
    log_p = (logits / temperature).log_softmax(-1)
    picked = log_p.gather(1, labels[:, None]).squeeze(1)
    expected = picked, -(log_p.exp() * log_p).sum(-1)
    log_probs, lse, entropy = _fused_statistics(logits.detach(), labels[:, None], temperature)
    torch.testing.assert_close((log_probs, entropy), tuple(x.detach() for x in expected))
    slopes = torch.linspace(-1, 2, T), torch.linspace(2, -1, T)
    (wanted,) = torch.autograd.grad(expected, logits, slopes)
    grad = _fused_grad_logits(logits.detach(), labels[:, None], lse, entropy, *slopes, temperature)
    torch.testing.assert_close(grad, wanted)


def test_masked_positions_are_zero_and_do_not_matter():
    hidden, weight, bias, labels = tensors()
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0] * 4)[:T]
    ours = log_probs_from_hidden(
        hidden, weight, labels, bias=bias, chunk_size=3, with_entropy=True, mask=mask
    )
    inputs = [hidden, weight, bias]
    expected = [x * mask for x in reference(hidden, weight, bias, labels, 1.0)]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(gradients(ours, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_an_empty_mask_still_reaches_every_input():
    hidden, weight, _, labels = tensors(with_bias=False)
    log_probs, _ = log_probs_from_hidden(hidden, weight, labels, mask=torch.zeros(T))
    log_probs.sum().backward()
    assert not log_probs.any()
    assert not hidden.grad.any() and not weight.grad.any()


def test_padded_vocabulary_entries_have_no_probability():
    hidden, weight, bias, labels = tensors()
    labels = labels % 8
    inputs = [hidden, weight, bias]
    ours = log_probs_from_hidden(
        hidden, weight, labels, bias=bias, with_entropy=True, vocab_size=8, temperature=0.5
    )
    expected = reference(hidden, weight[:8], bias[:8], labels, 0.5)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(gradients(ours, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(a, b)


class LargestTensor(TorchDispatchMode):
    """The most elements any single operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_the_whole_matrix_of_logits_never_exists():
    tokens, width, vocab, chunk = 64, 4, 500, 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))

    def largest(compute):
        with LargestTensor() as watch:
            sum(x.sum() for x in compute()).backward()
        return watch.numel

    assert largest(lambda: reference(hidden, weight, None, labels, 1.0)) >= tokens * vocab
    assert (
        largest(
            lambda: log_probs_from_hidden(
                hidden, weight, labels, chunk_size=chunk, with_entropy=True
            )
        )
        <= chunk * vocab
    )
