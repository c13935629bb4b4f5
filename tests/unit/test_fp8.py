"""8-bit weights against a loop over elements, and the tool that writes checkpoints of them."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.hf_weights.reader import HfReader
from slime.core.errors import UserError
from slime.weights.fp8 import (
    FP8,
    convert_to_fp8,
    dequantize,
    load_causal_lm,
    quantize,
    quantize_all,
    read_dequantized,
)
from slime.weights.fp8_format import (
    Fp8Format,
    declaration,
    format_of,
    is_quantized,
    quantized_in,
    refuse_unreadable,
)
from slime.weights.sglang_checksums import ModelFacts
from slime.weights.sync import WeightSync
from slime.weights.transport import WeightTransport
from tests.fakes import FakeEngine
from tests.tiny import make_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SMALL = Fp8Format(strategy="block", block=(2, 3))
FORMATS = [SMALL, Fp8Format(strategy="channel"), Fp8Format(strategy="tensor")]


def part(layout: Fp8Format, row: int, column: int) -> tuple[int, int]:
    """Which scale an element has."""
    if layout.strategy == "block":
        return row // layout.block[0], column // layout.block[1]
    return (row, 0) if layout.strategy == "channel" else (0, 0)


@pytest.mark.parametrize("layout", FORMATS, ids=lambda layout: layout.strategy)
def test_against_a_loop_over_elements(layout):
    matrix = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 3
    matrix[0] = 0
    matrix[1, :3] = 0
    largest: dict[tuple[int, int], float] = {}
    for row in range(5):
        for column in range(7):
            place = part(layout, row, column)
            largest[place] = max(largest.get(place, 0.0), abs(matrix[row, column].item()))
    values, scale = quantize(matrix, layout)
    assert values.dtype == FP8 and scale.dtype == torch.float32
    for row in range(5):
        for column in range(7):
            place = part(layout, row, column)
            one = scale[place] if scale.ndim else scale
            top = torch.tensor(largest[place])
            assert one == (top / 448 if top > 0 else 1.0)
            assert values[row, column].float() == (matrix[row, column] / one).to(FP8).float()
    back = dequantize(values, scale, layout)
    for row in range(5):
        for column in range(7):
            top = largest[part(layout, row, column)]
            bound = max(
                abs(matrix[row, column].item()) / 16, top / 448 / 2**9
            )  # 3 bits of mantissa
            assert abs(back[row, column] - matrix[row, column]) <= bound * 1.001


@pytest.mark.parametrize("layout", FORMATS, ids=lambda layout: layout.strategy)
def test_a_config_says_which_layout_it_is(layout):
    config = json.loads(json.dumps({"quantization_config": declaration(layout, ["lm_head"])}))
    found = format_of(config)
    assert found is not None and found.strategy == layout.strategy
    assert layout.strategy != "block" or found.block == layout.block
    assert format_of({}) is None
    assert format_of({"quantization_config": {"quant_method": "awq"}}) is None


def test_ue8m0_scales_are_the_next_powers_of_two():
    layout = Fp8Format(strategy="block", block=(1, 2), scale_fmt="ue8m0")
    tops = [448.0, 449.0, 448 * 2.0**-9, 3.0, 0.0]
    matrix = torch.tensor([[top, -top / 3] for top in tops])
    values, scale = quantize(matrix, layout)
    expected = [2.0 ** math.ceil(math.log2(top / 448)) if top else 1.0 for top in tops]
    assert scale.flatten().tolist() == expected == [1.0, 2.0, 2.0**-9, 2.0**-7, 1.0]
    assert values.float().abs().max() <= 448 and not values.float().isnan().any()
    error = (dequantize(values, scale, layout) - matrix).abs()
    assert (error <= matrix.abs() / 16 * 1.001).all()
    config = {"quantization_config": declaration(layout, [])}
    assert config["quantization_config"]["scale_fmt"] == "ue8m0" and format_of(config) == layout


def packed(kind: str, bits: int, layout: str) -> dict:
    groups = {"group_0": {"weights": {"type": kind, "num_bits": bits, "strategy": "group"}}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        (packed("int", 4, "pack-quantized"), "INT4 (pack-quantized of compressed-tensors)"),
        (packed("float", 4, "nvfp4-pack-quantized"), "FP4 (nvfp4-pack-quantized of"),
        ({"quant_method": "awq", "bits": 4}, "INT4 (AWQ)"),
        ({"quant_method": "gptq", "bits": 4}, "INT4 (GPTQ)"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ],
)
def test_other_quantized_weights_are_named_for_what_they_are(model, tmp_path, declared, name):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    for read in (lambda: convert_to_fp8(model, tmp_path / "fp8", SMALL), lambda: HfReader(model)):
        with pytest.raises(UserError, match=re.escape(f"holds weights in {name}")):
            read()
    assert not (tmp_path / "fp8").exists()


@pytest.fixture
def model(tmp_path) -> Path:
    return make_tiny_checkpoint(
        tmp_path / "bf16", "qwen3_moe", dtype=torch.bfloat16, hidden_size=96, intermediate_size=160
    )


def test_the_tool_writes_a_checkpoint_and_goes_on_where_it_stopped(model, tmp_path):
    target = tmp_path / "fp8"
    command = [sys.executable, str(ROOT / "tools/convert_hf_to_fp8.py"), "--model-dir", str(model)]
    command += ["--save-dir", str(target), "--strategy", "block", "--block-size", "64", "64"]
    command += ["--max-workers", "2"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == ["1/1 model.safetensors"]
    config = json.loads((target / "config.json").read_text())
    layout = Fp8Format(strategy="block", block=(64, 64))
    assert format_of(config) == layout
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert "lm_head" in kept and "model.layers.0.mlp.gate" in kept
    before, after = (load_file(folder / "model.safetensors") for folder in (model, target))
    for name, tensor in before.items():
        if name.endswith("_proj.weight"):
            values, scale = quantize(tensor, layout)
            assert torch.equal(after[name].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(after[f"{name}_scale_inv"], scale)
        else:
            assert torch.equal(after[name], tensor)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1 and "is not empty" in again.stderr


def test_an_interrupted_conversion_is_continued_only_as_it_began(model, tmp_path):
    target, layout = tmp_path / "fp8", Fp8Format(strategy="channel")
    convert_to_fp8(model, target, layout)
    (target / "config.json").unlink()  # as if it had been stopped before the end
    (target / "fp8_conversion.json").write_text(
        json.dumps({"strategy": "channel", "block": [128, 128]})
    )
    written = (target / "model.safetensors").stat().st_mtime_ns
    said: list[str] = []
    with pytest.raises(UserError, match="part of a conversion"):
        convert_to_fp8(model, target, Fp8Format(strategy="tensor"))
    convert_to_fp8(model, target, layout, say=said.append)
    assert said == ["1 of 1 files exist from an earlier conversion"]
    assert (target / "model.safetensors").stat().st_mtime_ns == written
    assert (target / "config.json").exists()


def test_a_model_that_is_in_fp8_already_is_refused(model, tmp_path):
    convert_to_fp8(model, tmp_path / "fp8", SMALL)
    with pytest.raises(UserError, match="already"):
        convert_to_fp8(tmp_path / "fp8", tmp_path / "again", SMALL)


@pytest.mark.parametrize("layout", FORMATS, ids=lambda layout: layout.strategy)
def test_a_tensor_without_its_scale_is_named(layout, tmp_path):
    values, _ = quantize(torch.randn(4, 6), layout)
    save_file({"up_proj.weight": values}, tmp_path / "model.safetensors")
    scale = f"up_proj.{layout.scale_suffix}"
    with pytest.raises(UserError, match=f"up_proj.weight is in FP8 and has no {scale}"):
        read_dequantized(tmp_path, layout, torch.bfloat16)
    config = {"quantization_config": declaration(layout, [])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is in FP8 and has no scales"):
        HfReader(tmp_path).read("up_proj.weight")


def test_fp8_that_no_config_declares_is_refused(model, tmp_path):
    """Its values are up to 448 and would be taken for the weights."""
    convert_to_fp8(model, tmp_path / "fp8", SMALL)
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no quantization_config"):
        load_causal_lm(str(tmp_path / "fp8"))
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(UserError, match=f"{name} is in FP8"):
        HfReader(tmp_path / "fp8").read(name)


class Recorded(WeightTransport):
    """A transport that keeps what it was given."""

    shares_device = False

    def __init__(self):
        self.tensors: dict[str, torch.Tensor] = {}

    def open(self, engines, version): ...

    def send(self, bucket):
        self.tensors.update(bucket.tensors)

    def finish(self): ...

    def close(self): ...


def sent_in_an_update(
    tensors: list[tuple[str, torch.Tensor]], facts: ModelFacts
) -> dict[str, torch.Tensor]:
    transport, engine = Recorded(), FakeEngine({}, token="t")
    engine.version = "1"
    try:
        sync = WeightSync(transport, token="t", verify=False, model=facts)
        sync.update([tensors[:9], tensors[9:]], [engine.info], 1)
    finally:
        engine.close()
    return transport.tensors


@pytest.mark.parametrize("layout", FORMATS, ids=lambda layout: layout.strategy)
def test_what_an_update_sends_is_what_the_tool_writes(model, tmp_path, layout):
    convert_to_fp8(model, tmp_path / "fp8", layout)
    offline = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors = list(load_file(model / "model.safetensors").items())
    received = sent_in_an_update(tensors, ModelFacts(fp8=layout))
    assert received.keys() == offline.keys()
    for name, tensor in offline.items():
        sent = received[name]
        assert sent.dtype == tensor.dtype and sent.shape == tensor.shape
        bits = torch.uint8 if tensor.dtype == FP8 else tensor.dtype
        assert torch.equal(sent.view(bits), tensor.view(bits))


@pytest.mark.parametrize("name", ["mtp_layers.0.input_proj", "layers.61.shared_head.head"])
def test_projections_of_mtp_layers_stay_as_they_are(name):
    assert not is_quantized(f"model.{name}.weight", 2)
    assert is_quantized("model.layers.61.mlp.down_proj.weight", 2)


@pytest.mark.parametrize(
    "router",
    [
        "mlp.gate",  # Qwen3, DeepSeek
        "block_sparse_moe.gate",  # Mixtral, MiniMax
        "feed_forward.gate",  # LFM2
        "feed_forward.router",  # Llama 4
        "mlp.router",  # GPT-OSS
        "block_sparse_moe.router.layer",  # Granite
    ],
)
def test_no_router_is_quantized(router):
    assert not is_quantized(f"model.layers.0.{router}.weight", 2)
    assert is_quantized(f"model.layers.0.{router.split('.')[0]}.experts.0.gate_proj.weight", 2)


def test_an_update_quantizes_the_tensors_that_have_scales_in_the_checkpoint(model, tmp_path):
    """Here the checkpoint keeps a projection that the converter would quantize."""
    convert_to_fp8(model, tmp_path / "fp8", SMALL)
    plain, stored = (load_file(f / "model.safetensors") for f in (model, tmp_path / "fp8"))
    kept = "model.layers.0.self_attn.o_proj.weight"
    stored[kept] = plain[kept]
    del stored[f"{kept}_scale_inv"]
    save_file(stored, tmp_path / "fp8" / "model.safetensors")
    (tmp_path / "fp8" / "model.safetensors.index.json").unlink()
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    chosen = quantized_in(tmp_path / "fp8", config, SMALL)
    sent = sent_in_an_update(list(plain.items()), ModelFacts(fp8=SMALL, quantizes=chosen))
    assert sent.keys() == stored.keys()
    assert {n: t.dtype for n, t in sent.items()} == {n: t.dtype for n, t in stored.items()}


@pytest.mark.parametrize(
    ("declared", "module"),
    [
        ({"modules_to_not_convert": ["o_proj"]}, "model.layers.0.self_attn.o_proj"),
        ({"modules_to_not_convert": ["model.layers.0"]}, "model.layers.0.self_attn.o_proj"),
        ({"ignored_layers": ["mlp"]}, "model.layers.0.mlp.up_proj"),
        ({"ignore": ["re:.*o_proj$"]}, "model.layers.0.self_attn.o_proj"),
    ],
)
def test_without_weight_files_config_json_says_what_is_not_quantized(tmp_path, declared, module):
    config = {"quantization_config": {"quant_method": "fp8", **declared}}
    chosen = quantized_in(tmp_path, config, SMALL)
    assert not chosen(f"{module}.weight", 2)
    assert chosen("model.layers.10.self_attn.q_proj.weight", 2)


@pytest.mark.parametrize(
    "pattern", [".*lm_head", ".*mlp.gate$", r".*mlp\.gate$", "visual.*", "^lm_head$", ".*mlp.gate"]
)
def test_patterns_of_config_json_exclude_what_re_match_finds(tmp_path, pattern):
    config = {"quantization_config": {"quant_method": "fp8", "ignore": [f"re:{pattern}"]}}
    chosen = quantized_in(tmp_path, config, SMALL)
    for module in ("lm_head2", "layers.0.mlp.gate_proj", "layers.1.mlpxgate", "visual2.blocks.0"):
        found = re.match(pattern, module) is not None
        assert chosen(f"{module}.weight", 2) is not (
            found or not is_quantized(f"{module}.weight", 2)
        )


@pytest.mark.parametrize("pattern", ["(a+)+$", "[a-z]*x", "a|b", "(?!x)", ".*a" * 9, "a" * 300, "as?$", "a*b"])  # fmt: skip
def test_patterns_that_could_take_forever_or_be_misread_are_refused(tmp_path, pattern):
    config = {"quantization_config": {"quant_method": "fp8", "ignore": [f"re:{pattern}"]}}
    with pytest.raises(UserError, match="list the modules by name"):
        quantized_in(tmp_path, config, SMALL)("a" * 60 + "b.weight", 2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.language_model.layers.0.mlp.experts.gate_up_proj", (4, 8, 12)),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (4, 8, 12)),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", (4, 8, 2, 16)),
    ],
)
def test_fused_experts_that_are_not_split_are_refused(tmp_path, name, shape):
    """They would stay in bf16 and not be listed in modules_to_not_convert."""
    source = tmp_path / "bf16"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3_vl_moe"}')
    save_file({name: torch.zeros(shape, dtype=torch.bfloat16)}, source / "model.safetensors")
    with pytest.raises(UserError, match=f"{re.escape(name)} .* holds all experts of a layer"):
        convert_to_fp8(source, tmp_path / "fp8", SMALL)
    assert not (tmp_path / "fp8").exists()


def compressed(**weights: object) -> dict:
    weights = {"type": "float", "num_bits": 8, **weights}
    groups = {"group_0": {"weights": weights}}
    named = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {"quantization_config": {**named, "config_groups": groups}}


def test_blocks_of_compressed_tensors_are_read_with_their_scales(tmp_path):
    config = compressed(strategy="block", block_structure=[2, 3])
    layout = format_of(config)
    assert layout is not None and (layout.strategy, layout.block) == ("block", (2, 3))
    matrix = torch.randn(5, 7)
    values, scale = quantize(matrix, SMALL)
    save_file({"a.weight": values, "a.weight_scale": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = dequantize(values, scale, SMALL)
    read = read_dequantized(tmp_path, layout, torch.float32)
    assert read.keys() == {"a.weight"} and torch.equal(read["a.weight"], expected)
    assert torch.equal(HfReader(tmp_path).read("a.weight"), expected.bfloat16())
    sent = dict(quantize_all([("a.weight", matrix)], layout))
    assert sent.keys() == {"a.weight", "a.weight_scale"}


def test_scales_that_are_not_read_are_named(model):
    config = json.loads((model / "config.json").read_text()) | compressed(strategy="group")
    (model / "config.json").write_text(json.dumps(config))
    assert format_of(config) is None
    for read in (lambda: load_causal_lm(str(model)), lambda: HfReader(model)):
        with pytest.raises(UserError, match=r"FP8 .*float-quantized of .*, scales per group"):
            read()


@pytest.mark.parametrize("groups", [None, {}, {"group_0": {"weights": None}}])
def test_compressed_tensors_without_a_layout_are_refused_by_name(tmp_path, groups):
    declared = {"quant_method": "compressed-tensors", "config_groups": groups}
    with pytest.raises(UserError, match=r"compressed-tensors.* which slime does not read"):
        refuse_unreadable(tmp_path, {"quantization_config": declared})
