"""The fast forward is the model's, also with kernels that leave sums in parts for the next norm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.engine.kernels.cpu_kernels import SOURCE, CpuKernels
from slime.engine.kernels.interface import Tokens
from slime.engine.kv_cache import KVCache
from slime.engine.models.fast_model import FastModel
from slime.utils.compiled import load_library
from tests.tiny import make_tiny_checkpoint

COUNT, PAGE = 7, 4


class InParts(CpuKernels):
    """As on a GPU with few rows: a product in three parts, which the norm adds up."""

    def linear_split_k(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        whole = self.linear(x, weight, bias)
        return torch.stack([2 * whole, -3 * whole, 2 * whole])

    def add_rms_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        zero_centred: bool = False,
    ) -> torch.Tensor:
        whole = delta if delta is None or delta.ndim == 2 else delta.sum(0)
        assert whole is None or whole.shape == hidden.shape
        return super().add_rms_norm(hidden, whole, weight, eps, zero_centred)


@pytest.mark.parametrize("kind", [CpuKernels, InParts])
@pytest.mark.parametrize("wanted", [None, [6], [1, 4, 5]], ids=["all", "last", "some"])
def test_logits_are_hugging_faces(tmp_path: Path, kind: type[CpuKernels], wanted: list[int] | None):
    library = load_library(SOURCE)
    if library is None:
        pytest.skip("no gcc here")
    folder = make_tiny_checkpoint(tmp_path / "m", weight_scale=3.0)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, hf.config.vocab_size, (COUNT,), generator=torch.manual_seed(0))
    with torch.inference_mode():
        expected = hf(ids[None]).logits[0]
        fast = FastModel(hf, kind(library), context_len=64)
        cache = KVCache(fast.layers, 4, PAGE, torch.float32, torch.device("cpu"))
        tokens = Tokens(
            ids=ids.to(torch.int32),
            positions=torch.arange(COUNT, dtype=torch.int32),
            rows=torch.zeros(COUNT, dtype=torch.int32),
        )
        outputs = None if wanted is None else torch.tensor(wanted)
        found = fast(tokens, cache, torch.tensor([[3, 1]], dtype=torch.int32), outputs)
    expected = expected if wanted is None else expected[wanted]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
