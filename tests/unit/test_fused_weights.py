"""Linears that share an input lie in one tensor, on a GPU with the adapters' A below; updates write through."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.engine.lora.bank import LoraBank
from slime.engine.models.fused_weights import Projection
from tests.tiny import make_tiny_checkpoint


@pytest.mark.parametrize("family", ["qwen3", "qwen2"], ids=["without biases", "with biases"])
def test_updates_of_the_base_and_of_adapters_reach_the_joined_tensor(family: str, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_checkpoint(tmp_path, family))
    attention = model.model.layers[0].self_attn
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    bank = LoraBank(model, num_slots=1, rank=1)
    kernels = SimpleNamespace(joins_adapters=True)
    projection = Projection(attention, "qkv", linears, kernels, bank)  # type: ignore[arg-type]
    assert projection.lora is not None and projection.lora.joined is not None
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
    weight, bias = projection.lora.joined
    rows = sum(linear.out_features for linear in linears)
    assert len(weight) % 16 == 0 and not weight[rows:].any()
    assert bias is None or not bias[rows:].any()
    with torch.no_grad():
        for number, linear in enumerate(linears):
            linear.weight.fill_(number + 1)
            if linear.bias is not None:
                linear.bias.fill_(-number - 1)
        projection.lora.a.fill_(7)
    expected = torch.cat([x.weight for x in linears])
    assert torch.equal(weight[:rows], expected) and torch.equal(projection.base[0], expected)
    assert (weight[rows : rows + 3] == 7).all() and not weight[rows + 3 :].any()
    if bias is not None:
        assert torch.equal(bias[:rows], torch.cat([x.bias for x in linears]))
