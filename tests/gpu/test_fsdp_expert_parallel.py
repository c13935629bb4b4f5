"""Expert parallelism on one GPU: the exchange and the grouped matmuls in bf16, with groups of one rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from slime.backends.fsdp_utils.expert_parallel import ExpertGroups, parallelize_experts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=16,
    num_experts_per_tok=4,
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 7, 500])
def test_output_and_gradients_are_hugging_faces(group, dtype, tokens):
    torch.manual_seed(0)
    with torch.device("cuda"):
        theirs = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype)
    theirs.set_experts_implementation("eager")
    ours = copy.deepcopy(theirs)
    weights = dict(theirs.named_parameters())
    mesh = init_device_mesh("cuda", (1,))
    parallelize_experts(ours, mesh, ExpertGroups(exchange=group, shards=group), dtype)
    results = []
    for model in (theirs, ours):
        experts = model.model.layers[0].mlp.experts
        hidden = torch.linspace(-1, 1, tokens * 256, device="cuda", dtype=dtype).view(tokens, 256)
        chosen = torch.rand(tokens, 16, device="cuda", generator=_generator()).topk(4)
        hidden.requires_grad_()
        scores = chosen.values.to(dtype).requires_grad_()
        if model is ours:
            for name in ("gate_up_proj", "down_proj"):
                whole = weights[f"model.layers.0.mlp.experts.{name}"]
                getattr(experts, name).data.to_local().copy_(whole.data)
        output = experts(hidden, chosen.indices, scores)
        output.float().square().sum().backward()
        grads = [getattr(experts, name).grad for name in ("gate_up_proj", "down_proj")]
        local = [grad.to_local() if model is ours else grad for grad in grads]
        results.append([output, hidden.grad, scores.grad, *local])
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    for expected, found in zip(*results, strict=True):
        gap = (found.float() - expected.float()).abs().max()
        assert gap <= tolerance * expected.float().abs().max()


def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(1)
