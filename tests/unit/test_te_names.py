"""Tensors of TransformerEngine's layers, recorded on a GPU, against the weight rules; without either."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from slime.backends.megatron_utils.checkpoint_state import use_stored_keys
from slime.backends.megatron_utils.hf_weights.families import weight_map
from slime.backends.megatron_utils.hf_weights.local_weights import (
    Layout,
    check_shape,
    local_weights,
)
from slime.backends.megatron_utils.hf_weights.mappings import Shard
from slime.backends.megatron_utils.hf_weights.reader import HfReader
from slime.backends.megatron_utils.model_config import read_config
from tests.args import make_args
from tests.parity.tiny_families import UNTRAINED, make_family

RECORDED = sorted((Path(__file__).parents[1] / "data" / "te_names").glob("*.json"))
LISTS = {path.stem: json.loads(path.read_text()) for path in RECORDED}
DELTA_NET_NORMS = (
    "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight",  # of megatron-core's own layers, as of attention
    "self_attention.in_proj.layer_norm_weight",  # of TransformerEngine's
)


class Recorded(torch.nn.Module):
    """Stands for a model chunk that was built elsewhere."""

    def __init__(self, rank: dict[str, Any], layout: dict[str, Any]) -> None:
        super().__init__()
        self.tensors, self.output_layer = rank["tensors"], None
        self.decoder = SimpleNamespace(
            layers=[SimpleNamespace(layer_number=number + 1) for number in rank["layers"]]
        )
        self.config = SimpleNamespace(
            num_moe_experts=rank["experts"],
            expert_model_parallel_size=layout.get("expert_model_parallel_size", 1),
        )

    def state_dict(self, **_: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {name: torch.empty(shape, device="meta") for name, shape in self.tensors.items()}


def layout_of(rank: int, layout: dict[str, Any]) -> Layout:
    """megatron-core counts tensor ranks first, then data-parallel and expert ranks, then stages."""
    tp, ep = layout["tensor_model_parallel_size"], layout.get("expert_model_parallel_size", 1)
    return Layout(tensor=Shard(rank % tp, tp), expert=Shard(rank % ep, ep))


@pytest.mark.skipif(not LISTS, reason="nothing was recorded: python -m tests.gpu.te_names")
@pytest.mark.parametrize("family", LISTS)
def test_every_recorded_tensor_has_a_rule_and_its_shape(tmp_path: Path, family: str):
    found = LISTS[family]
    assert "error" not in found, found["error"]
    checkpoint = make_family(tmp_path / family, family)
    args = make_args(train_backend="megatron", hf_checkpoint=str(checkpoint)).replace(
        **found["layout"]
    )
    weights, reader = weight_map(read_config(checkpoint), args), HfReader(checkpoint)
    covered: set[str] = set()
    for rank in found["ranks"]:
        layout = layout_of(rank["rank"], found["layout"])
        for weight in local_weights([Recorded(rank, found["layout"])], weights, layout):
            check_shape(weight, reader, layout)
            covered.update(weight.match.hf_names)
    assert covered == set(reader.names()) - set(UNTRAINED.get(family, []))


@pytest.mark.skipif(not LISTS, reason="nothing was recorded: python -m tests.gpu.te_names")
@pytest.mark.parametrize("family", LISTS)
def test_names_are_transformer_engines(family: str):
    """A list that was recorded with other layers would prove nothing."""
    found = LISTS[family]
    assert found["impl"] == "transformer_engine"
    names = {name for rank in found["ranks"] for name in rank["tensors"]}
    assert any(name.endswith("layer_norm_weight") for name in names)
    if found["ranks"][0]["experts"]:
        assert any(".mlp.experts.linear_fc1.weight0" in name for name in names)


@pytest.mark.skipif(not LISTS, reason="nothing was recorded: python -m tests.gpu.te_names")
@pytest.mark.parametrize("family", LISTS)
def test_a_checkpoint_written_under_transformer_engine_has_our_keys(family: str):
    """Every fused norm's key is found from the name that our layers give it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    keys = {key for rank in LISTS[family]["ranks"] for key in rank["stored"]}
    assert "error" not in keys
    ours = {
        ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
        ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
    }
    fused = [key for key in keys if any(name in key for name in ours)]
    for key in fused:
        mine = key
        for theirs, name in ours.items():
            mine = mine.replace(theirs, name)
        tensor = ShardedTensor.from_rank_offsets(mine, torch.empty(4))
        use_stored_keys({"x": tensor}, keys)
        assert tensor.key == key


@pytest.mark.parametrize("prefix", ["decoder.layers.3.", "decoder.layers."])
@pytest.mark.parametrize(("mine", "theirs"), permutations(DELTA_NET_NORMS, 2))
def test_the_norm_before_a_delta_net_is_found_under_each_of_its_keys(prefix, mine, theirs):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tensor = ShardedTensor.from_rank_offsets(prefix + mine, torch.empty(4))
    use_stored_keys({"x": tensor}, {prefix + theirs})
    assert tensor.key == prefix + theirs
