"""Checksums of SGLang's parameters, told from Hugging Face tensors, against a naive layout."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch

from slime.weights.fp8 import Fp8Format, dequantize, quantize
from slime.weights.sglang_checksums import ModelFacts, PredictedChecksums, Sharding, sharding_of

LAYER = "model.layers.0"
HEAD, HIDDEN, WIDTH, VOCABULARY = 4, 16, 24, 100
DENSE = {
    f"{LAYER}.self_attn.q_proj.weight": (8 * HEAD, HIDDEN),
    f"{LAYER}.self_attn.k_proj.weight": (2 * HEAD, HIDDEN),
    f"{LAYER}.self_attn.v_proj.weight": (2 * HEAD, HIDDEN),
    f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, 8 * HEAD),
    f"{LAYER}.mlp.gate_proj.weight": (WIDTH, HIDDEN),
    f"{LAYER}.mlp.up_proj.weight": (WIDTH, HIDDEN),
    f"{LAYER}.mlp.down_proj.weight": (HIDDEN, WIDTH),
    f"{LAYER}.input_layernorm.weight": (HIDDEN,),
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    f"{LAYER}.self_attn.q_proj.bias": (8 * HEAD,),
    f"{LAYER}.self_attn.k_proj.bias": (2 * HEAD,),
    f"{LAYER}.self_attn.v_proj.bias": (2 * HEAD,),
}


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def served(named: dict[str, torch.Tensor], **cuts: int) -> list[dict[str, str]]:
    """The same in whatever order tensors arrive; the buckets they lie in are used again."""
    found = []
    for seed in range(3):
        order = list(named)
        random.Random(seed).shuffle(order)
        sums = PredictedChecksums(Sharding(**cuts))
        for name in order:
            buffer = named[name].clone()
            sums.add(name, buffer)
            buffer.zero_()
        found.append(sums.sums)
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_dense_model_is_fused_and_cut_over_ranks(tp_size):
    """With four ranks and two heads of keys, each head is on two ranks."""
    named = tensors(DENSE)
    q, k, v, o, gate, up, down, norm, embed, head, *biases = named.values()
    zeros = torch.zeros(128 - VOCABULARY, HIDDEN)
    found = served(named, tp_size=tp_size, num_kv_heads=2)
    for rank in range(tp_size):
        first, count = (rank * 2 // tp_size, max(2 // tp_size, 1))

        def fused(q, k, v, rank: int = rank, first: int = first, count: int = count):
            heads = q.unflatten(0, (8, HEAD))[rank * 8 // tp_size :][: 8 // tp_size]
            keys, values = (x.unflatten(0, (2, HEAD))[first : first + count] for x in (k, v))
            return torch.cat([heads, keys, values]).flatten(0, 1)

        assert found[rank] == {
            f"{LAYER}.self_attn.qkv_proj.weight": digest(fused(q, k, v)),
            f"{LAYER}.self_attn.qkv_proj.bias": digest(fused(*biases)),
            f"{LAYER}.self_attn.o_proj.weight": digest(o.chunk(tp_size, 1)[rank]),
            f"{LAYER}.mlp.gate_up_proj.weight": digest(
                torch.cat([gate.chunk(tp_size)[rank], up.chunk(tp_size)[rank]])
            ),
            f"{LAYER}.mlp.down_proj.weight": digest(down.chunk(tp_size, 1)[rank]),
            f"{LAYER}.input_layernorm.weight": digest(norm),
            "model.embed_tokens.weight": digest(torch.cat([embed, zeros]).chunk(tp_size)[rank]),
            "lm_head.weight": digest(torch.cat([head, zeros]).chunk(tp_size)[rank]),
        }


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_experts_are_shared_out_and_cut(ep_size):
    """Four ranks: four quarters of every expert, or two halves of half of them, or a quarter of them."""
    experts = f"{LAYER}.mlp.experts"
    shapes = {
        f"{experts}.{number}.{part}.weight": (HIDDEN, WIDTH) if part == "down_proj" else (WIDTH, HIDDEN)
        for number in range(8)
        for part in ("gate_proj", "up_proj", "down_proj")
    }  # fmt: skip
    named = tensors(shapes)
    found = served(named, tp_size=4, ep_size=ep_size, num_kv_heads=4, num_experts=8)
    size = 4 // ep_size
    for rank in range(4):
        group, part = divmod(rank, size)
        mine = range(group * 8 // ep_size, (group + 1) * 8 // ep_size)

        def cut(number: int, name: str, dim: int, part: int = part) -> torch.Tensor:
            return named[f"{experts}.{number}.{name}.weight"].chunk(size, dim)[part]

        first = [torch.cat([cut(n, "gate_proj", 0), cut(n, "up_proj", 0)]) for n in mine]
        second = [cut(n, "down_proj", 1) for n in mine]
        assert found[rank] == {
            f"{experts}.w13_weight": digest(torch.stack(first)),
            f"{experts}.w2_weight": digest(torch.stack(second)),
        }


def test_blocks_of_8_bits_are_summed_as_what_they_stand_for():
    layout = Fp8Format(strategy="block", block=(8, 8))
    plain = torch.randn(WIDTH, HIDDEN)
    weight, scale = quantize(plain, layout)
    name = f"{LAYER}.mlp.down_proj"
    found = served({f"{name}.weight": weight, f"{name}.weight_scale_inv": scale})
    wide = dequantize(weight, scale, layout).bfloat16().view(torch.int16)
    assert found == [{f"{name}.weight": digest(wide)}]


TOWER = {
    "model.visual.blocks.0.attn.qkv.weight": (3 * HIDDEN, HIDDEN),
    "model.visual.blocks.0.mlp.linear_fc1.bias": (WIDTH,),
    "model.visual.blocks.0.mlp.linear_fc2.weight": (HIDDEN, WIDTH),
    "model.visual.pos_embed.weight": (16, HIDDEN),
    "model.language_model.norm.weight": (HIDDEN,),
}


@pytest.mark.parametrize("only_tower", [False, True])
def test_a_vision_tower_keeps_its_layout_but_for_zeros_at_ends(only_tower):
    """Positions are padded to 64, and the width of its MLPs to 32 on a CPU."""
    named = tensors(TOWER)
    qkv, bias, down, positions, norm = named.values()
    language = {} if only_tower else {"model.norm.weight": digest(norm)}
    assert served(named, only_tower=only_tower, width_multiple=32) == [
        {
            "visual.blocks.0.attn.qkv_proj.weight": digest(qkv),
            "visual.blocks.0.mlp.linear_fc1.bias": digest(torch.cat([bias, torch.zeros(8)])),
            "visual.blocks.0.mlp.linear_fc2.weight": digest(
                torch.cat([down, torch.zeros(HIDDEN, 8)], 1)
            ),
            "visual.pos_embed.weight": digest(torch.cat([positions, torch.zeros(48, HIDDEN)])),
            **language,
        }
    ]


@pytest.mark.parametrize(("frozen", "only_tower"), [(True, False), (False, False), (False, True)])
def test_a_parameter_of_the_tower_is_missed_unless_the_tower_is_frozen(frozen, only_tower):
    sums = PredictedChecksums(Sharding(only_tower=only_tower))
    for name, tensor in tensors(TOWER).items():
        if not (frozen and "visual" in name):
            sums.add(name, tensor)
    assert sums.may_be_unsent("visual.merger.norm.weight") == frozen
    assert sums.may_be_unsent("model.layers.0.self_attn.rotary_emb.axis_map")
    assert sums.may_be_unsent("model.layers.0.input_layernorm.weight") == only_tower


MODEL = ModelFacts(num_kv_heads=4)


@pytest.mark.parametrize(
    ("server", "architecture", "model", "known"),
    [
        ({"tp_size": 8}, "Qwen3ForCausalLM", MODEL, True),
        ({"tp_size": 3}, "Qwen3ForCausalLM", MODEL, False),
        ({"tp_size": 8, "device": "cpu"}, "Qwen3ForCausalLM", MODEL, False),
        ({"tp_size": 2}, "GptOssForCausalLM", MODEL, False),
        ({"tp_size": 1}, "Qwen3_5ForConditionalGeneration", MODEL, True),
        ({"tp_size": 2}, "Qwen3VLForConditionalGeneration", MODEL, False),
        ({"tp_size": 2, "enable_dp_attention": True}, "Qwen3ForCausalLM", MODEL, False),
        ({"tp_size": 2, "speculative_algorithm": "EAGLE"}, "Qwen3ForCausalLM", MODEL, False),
        ({"quantization": "awq"}, "Qwen3ForCausalLM", MODEL, False),
        ({"quantization": "fp8"}, "Qwen3ForCausalLM",
         ModelFacts(num_kv_heads=4, fp8=Fp8Format(strategy="block")), True),
        ({"quantization": "fp8"}, "Qwen3ForCausalLM",
         ModelFacts(num_kv_heads=4, fp8=Fp8Format(strategy="tensor")), False),
    ],
)  # fmt: skip
def test_where_the_layout_is_not_known_nothing_is_foretold(server, architecture, model, known):
    assert (sharding_of(server, [architecture], model) is not None) == known


def test_experts_in_an_order_of_a_kernels_own_are_left_out():
    facts = ModelFacts(num_kv_heads=4, num_experts=8)
    server = {"tp_size": 1, "device": "cuda", "moe_runner_backend": "flashinfer_trtllm"}
    cuts = sharding_of(server, ["Qwen3MoeForCausalLM"], facts)
    assert cuts is not None
    sums = PredictedChecksums(cuts)
    sums.add(f"{LAYER}.mlp.experts.0.up_proj.weight", torch.zeros(4, 4))
    assert sums.sums == [{}]
