"""How Hugging Face tensors make up a Megatron tensor, and how a rank's part is cut out of it."""

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.architecture import layer_pattern
from slime.backends.megatron_utils.hf_weights.mappings import (
    GateUp,
    InterleavedGateUp,
    Plain,
    Qkv,
    Shard,
    StackedExperts,
    Vocab,
)
from slime.backends.megatron_utils.hf_weights.reader import HfReader
from slime.backends.megatron_utils.hf_weights.rules import Rule, WeightMap, canonical
from slime.core.errors import ConfigError, UserError
from tests.dict_reader import DictReader

HEADS, GROUPS, DIM, HIDDEN, FFN, VOCAB = 8, 4, 3, 5, 8, 10


def numbered(*shape, start=0):
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def naive_qkv(q, k, v):
    """Group by group: the rows of its query heads, then of its key, then of its value."""
    rows = []
    each = HEADS // GROUPS
    for group in range(GROUPS):
        rows += [
            q[head * DIM + d]
            for head in range(group * each, (group + 1) * each)
            for d in range(DIM)
        ]
        rows += [k[group * DIM + d] for d in range(DIM)]
        rows += [v[group * DIM + d] for d in range(DIM)]
    return torch.stack(rows)


def qkv_case(*rest):
    tensors = [
        numbered(HEADS * DIM, *rest),
        numbered(GROUPS * DIM, *rest, start=1000),
        numbered(GROUPS * DIM, *rest, start=2000),
    ]
    return Qkv(GROUPS, DIM), tensors, naive_qkv(*tensors)


def gate_up_case():
    gate, up = numbered(FFN, HIDDEN), numbered(FFN, HIDDEN, start=1000)
    return GateUp(), [gate, up], torch.cat([gate, up])


def fused_case():
    _, _, whole = gate_up_case()
    return GateUp(fused=True), [whole], whole


def plain_case(cut):
    tensor = numbered(8, 12)
    return Plain(cut), [tensor], tensor


def vocab_case():
    rows = numbered(VOCAB, HIDDEN)
    return Vocab(VOCAB, 16), [rows], torch.cat([rows, torch.zeros(6, HIDDEN)])


CASES = {
    "qkv": lambda: qkv_case(HIDDEN),
    "qkv bias": qkv_case,
    "gate and up": gate_up_case,
    "gate and up in one": fused_case,
    "column": lambda: plain_case("column"),
    "row": lambda: plain_case("row"),
    "whole": lambda: plain_case(None),
    "vocabulary": vocab_case,
}


def parts_of(mapping, tensors, size, expert=0):
    names = [f"t{i}" for i in range(len(tensors))]
    reader = DictReader(dict(zip(names, tensors, strict=True)))
    shapes = [tuple(t.shape) for t in tensors]
    parts = []
    for rank in range(size):
        part = Shard(rank, size, expert=expert)
        target = torch.full(mapping.shape(shapes, part), float("nan"))
        mapping.fill(target, reader, names, part)
        parts.append(target)
    return parts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_make_up_the_whole(case, size):
    mapping, tensors, whole = CASES[case]()
    parts = parts_of(mapping, tensors, size)
    assert torch.equal(mapping.join(parts), whole)
    assert mapping.whole_shape(tuple(parts[0].shape), Shard(0, size)) == tuple(whole.shape)


@pytest.mark.parametrize("case", CASES)
def test_the_whole_gives_the_tensors_back(case):
    mapping, tensors, whole = CASES[case]()
    back = mapping.to_hf(whole)
    assert len(back) == len(tensors)
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


def test_a_rank_has_its_rows_of_gate_and_of_up():
    mapping, (gate, up), _ = gate_up_case()
    parts = parts_of(mapping, [gate, up], 2)
    assert torch.equal(parts[1], torch.cat([gate[4:], up[4:]]))


def test_more_ranks_than_groups_cut_a_group():
    mapping, tensors, whole = qkv_case(HIDDEN)
    assert torch.equal(torch.cat(parts_of(mapping, tensors, 8)), whole)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rest", [(HIDDEN,), ()])
def test_stacked_experts_with_gate_and_up_by_turns(size, rest):
    stacked = numbered(3, *rest, 2 * FFN)  # Hugging Face: [experts, in, gate and up by turns]
    expert = stacked[1]
    gate, up = expert[..., 0::2], expert[..., 1::2]
    whole = torch.cat([gate, up], dim=-1)
    whole = whole.t() if rest else whole
    mapping = StackedExperts(InterleavedGateUp())
    assert torch.equal(mapping.join(parts_of(mapping, [stacked], size, expert=1)), whole)
    assert torch.equal(mapping.to_hf(whole)[0], expert)


@pytest.mark.parametrize("size", [1, 2])
def test_stacked_down_projection(size):
    stacked = numbered(3, FFN, HIDDEN)
    mapping = StackedExperts(Plain("row"))
    assert torch.equal(mapping.join(parts_of(mapping, [stacked], size, expert=2)), stacked[2].t())
    assert torch.equal(mapping.to_hf(stacked[2].t())[0], stacked[2])


def test_reader_reads_parts_of_files(tmp_path):
    tensor = numbered(4, 6)
    save_file({"a": tensor, "b": numbered(3)}, tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    assert sorted(reader.names()) == ["a", "b"] and reader.shape("a") == (4, 6)
    assert torch.equal(reader.read("a"), tensor)
    assert torch.equal(reader.read("a", slice(1, 3)), tensor[1:3])
    assert torch.equal(reader.read("a", slice(None), slice(2, 4)), tensor[:, 2:4])
    with pytest.raises(UserError, match="has no tensor c"):
        reader.shape("c")


def test_incomplete_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="no safetensors weights"):
        HfReader(tmp_path)
    index = '{"weight_map": {"a": "model-00001.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(
        UserError, match=r"model-00001\.safetensors, named in its index, is missing"
    ):
        HfReader(tmp_path)


def test_rules_are_found_by_global_names():
    rule = Rule(
        "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.x",
        ("h.{layer}.{expert}",),
        Plain(),
    )
    weights = WeightMap(model_type="t", num_layers=9, rules=(rule,), untrained=("mtp.",))
    match = weights.match("decoder.layers.7.mlp.experts.local_experts.12.x")
    assert match is not None and match.hf_names == ["h.7.12"]
    assert weights.match("decoder.layers.7.mlp.experts.local_experts.12.xy") is None
    assert weights.is_untrained("mtp.0.weight") and weights.is_untrained("a.rotary_emb.inv_freq")
    assert not weights.is_untrained("model.mtp.weight")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.3.input_layernorm.weight",
        ),
        (
            "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
            "decoder.layers.3.pre_mlp_layernorm.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.linear_fc2.weight11",
            "decoder.layers.3.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        (
            "decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.3.self_attention.kv_layernorm.weight",
        ),
        ("decoder.layers.3.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
    ],
)
def test_names_of_transformer_engine(theirs, ours):
    assert canonical(theirs) == ours


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("1", [1, 1, 1, 1]),
        ("2", [1, 0, 1, 0]),
        ("[0]*1+[1]*3", [0, 1, 1, 1]),
        ("[0,1]*2", [0, 1, 0, 1]),
    ],
)
def test_layer_patterns(text, pattern):
    assert layer_pattern(text, 4) == pattern


@pytest.mark.parametrize("text", ["0", "[0]*3", "[1]*5", "one", "[0]*x+[1]*3", "__import__('os')"])
def test_bad_layer_patterns_are_refused(text):
    with pytest.raises(ConfigError, match="--moe-layer-freq"):
        layer_pattern(text, 4)


def test_four_bit_experts_are_read_as_numbers(tmp_path):
    """Against a loop over the bytes: two numbers each, the lower half first."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 4, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 4, 2), generator=generator, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    half = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = [*half, *(-v for v in half)]
    expected = torch.zeros(3, 64, 4)
    for e, row, group, at in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
        scale = 2.0 ** (int(scales[e, row, group]) - 127)
        byte = int(blocks[e, row, group, at])
        column = group * 32 + at * 2
        expected[e, column, row] = values[byte % 16] * scale
        expected[e, column + 1, row] = values[byte // 16] * scale
    reader = HfReader(tmp_path)
    assert reader.names() == ["w"] and reader.shape("w") == (3, 64, 4)
    assert torch.equal(reader.read("w").float(), expected)
    part = reader.read("w", slice(1, 2), slice(10, 40), slice(0, 2))
    assert torch.equal(part.float(), expected[1:2, 10:40, 0:2])


def test_eight_bit_weights_are_read_as_numbers(tmp_path):
    weight = torch.tensor([[1.0, -2.0, 4.0, 8.0], [0.5, 1.0, 2.0, 3.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0, 0.5]])  # one per 2 x 2 block
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "norm.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}'
    (tmp_path / "config.json").write_text(config)
    reader = HfReader(tmp_path)
    assert sorted(reader.names()) == ["a.weight", "norm.weight"]
    expected = torch.tensor([[2.0, -4.0, 2.0, 4.0], [1.0, 2.0, 1.0, 1.5]])
    assert torch.equal(reader.read("a.weight").float(), expected)
    assert torch.equal(reader.read("a.weight", slice(1, 2)).float(), expected[1:])
    assert reader.read("norm.weight").dtype == torch.float32
