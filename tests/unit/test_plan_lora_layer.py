"""The plan's count of a recomputed layer with adapters against the tensors that exist while one is trained."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime.backends.fsdp_utils.lora import add_adapters
from slime.backends.kernels.fused_ops import fuse_norms
from slime.backends.model_size import AdapterCount
from slime.cli.plan.activations import LayerCost, layer_cost
from slime.cli.plan.model_shape import shape_of
from slime.cli.plan.rank_layout import Sizes
from slime.cli.plan.request import PlanOptions, planned_args
from slime.config.lora import LoraConfig
from tests.unit.test_plan import argv
from tests.unit.test_plan_lora import MERGED

T, RANK = 512, 4
H, Q, KV, F, DIM = 64, 128, 64, 320, 32
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": Q // DIM,
    "num_key_value_heads": KV // DIM,
    "head_dim": DIM,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class LiveBytes(TorchDispatchMode):
    """The bytes of the storages that operations make, as long as they live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        for x in filter(_is_tensor, tree_leaves(out)):
            storage = x.untyped_storage()
            if storage._cdata not in known | self._seen:
                self._seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.fixture
def layer() -> Any:
    """A decoder layer as the FSDP trainer computes it, with adapters in its seven modules."""
    torch.manual_seed(0)
    config = Qwen3Config(**CONFIG, attn_implementation="sdpa")
    model = Qwen3ForCausalLM(config)
    add_adapters(model, LoraConfig(rank=RANK, alpha=8.0))
    fuse_norms(model)
    positions = torch.arange(T)[None]
    angles = model.model.rotary_emb(torch.zeros(1, T, H), positions)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        return model.model.layers[0](hidden, position_embeddings=angles, position_ids=positions)

    return forward


@pytest.fixture
def cost(tmp_path: Path) -> LayerCost:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    adapters = AdapterCount(
        rank=RANK, widths=1, layer=1, modules=7, in_mlp=True, served=1
    )  # of these a layer's cost takes rank and modules
    with planned_args(argv(str(tmp_path), *MERGED), PlanOptions()) as args:
        return layer_cost(
            args, shape_of(CONFIG), Sizes(world=1), repeats_keys=False, adapters=adapters
        )


def test_a_layer_saves_what_is_counted(layer: Any, cost: LayerCost):
    """Each saved storage once; on a CPU also cosines and sines, which are not of the layer."""
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter) and x.shape[-2:].numel() >= T:
            saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    hidden = torch.randn(1, T, H, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = layer(hidden)
    found = sum(saved.values()) / 4 / T
    assert out.shape == hidden.shape
    assert found == pytest.approx(cost.dense.total, rel=0.03)


def test_recomputing_and_the_backward_pass_hold_what_is_counted(layer: Any, cost: LayerCost):
    """The input counts as the boundary; `largest` has it once more, in place of the output's gradient."""
    hidden = torch.randn(1, T, H, requires_grad=True)
    out = checkpoint(layer, hidden, use_reentrant=False)
    grad = torch.randn_like(hidden)
    with LiveBytes() as live:
        torch.autograd.backward(out, grad)
    found = (live.peak + grad.nbytes) / 4 / T
    assert found == pytest.approx(cost.largest + cost.backward, rel=0.04)
