"""`slime convert merge-lora` against peft's merge_and_unload, and adapters that were made to do harm."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime.cli import main
from slime.config.lora import LoraConfig
from slime.core.errors import UserError
from slime.weights.fp8 import Fp8Format, convert_to_fp8
from slime.weights.peft_folder import merge_lora, to_peft, write_peft_folder
from tests.adapters import ALL, make_adapter
from tests.hostile import Payload
from tests.tiny import make_tiny_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def made(base, tmp_path_factory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter") / "peft")


@pytest.fixture
def adapter(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "adapter"))


def copy_of(base: Path, folder: Path, dtype: torch.dtype, **options: object) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(folder, **options)
    for file in base.glob("*token*"):
        shutil.copy(file, folder)
    return folder


# ---- what PEFT merges


@pytest.mark.parametrize(
    ("dtype", "rslora", "sharded", "tied"),
    [
        ("fp32", False, False, True),
        ("fp32", True, True, False),
        ("bf16", False, True, True),
        ("bf16", True, False, False),
        ("fp16", True, True, True),
    ],
)
def test_merged_weights_are_those_of_peft(tmp_path, dtype, rslora, sharded, tied):
    kind = DTYPES[dtype]
    original = make_tiny_checkpoint(tmp_path / "fp32", tie_word_embeddings=tied)
    shards = {"max_shard_size": "60KB"} if sharded else {}
    base = copy_of(original, tmp_path / "base", kind, **shards)
    assert (len(list(base.glob("*.safetensors"))) > 1) is sharded
    adapter = make_adapter(base, tmp_path / "peft", use_rslora=rslora)
    output = tmp_path / "merged"
    words = ["--base", str(base), "--adapter", str(adapter), "--output-dir", str(output)]
    assert main(["convert", "merge-lora", *words]) == 0
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=kind)
    peft = PeftModel.from_pretrained(whole, adapter).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(output)
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is tied
    assert found.dtype is kind
    # PEFT rounds the product before it adds it; here the sum is rounded once.
    unit = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}[dtype]
    for name, weight in found.state_dict().items():
        torch.testing.assert_close(weight, peft[name], rtol=2 * unit, atol=2 * unit)
    changed = {n for n, w in load_all(output).items() if not w.equal(load_all(base)[n])}
    assert changed == {f"model.layers.{i}.{part}" for i in range(2) for part in PARTS}


PARTS = [
    *(f"self_attn.{name}.weight" for name in ALL[:4]),
    *(f"mlp.{name}.weight" for name in ALL[4:]),
]


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def test_one_rounding_of_the_exact_sum(base, made, tmp_path):
    """bf16: every weight is the bf16 nearest to W + scaling B A in double precision."""
    half = copy_of(base, tmp_path / "half", torch.bfloat16)
    merge_lora(str(half), str(made), str(tmp_path / "merged"))
    adapters, before = load_all(made), load_all(half)
    name = "model.layers.0.mlp.down_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    exact = before[f"{name}.weight"].double() + 2 * b @ a
    found = load_all(tmp_path / "merged")[f"{name}.weight"]
    distance = (found.double() - exact).abs()
    nearest = (exact.to(torch.bfloat16).double() - exact).abs()
    assert (distance <= nearest + 1e-6).all()


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
def test_a_base_in_fp8_is_dequantized(base, adapter, tmp_path, strategy):
    """The output is bf16; FP8 values times their scales are exact in fp32 and rounded to bf16 once."""
    half = copy_of(base, tmp_path / "half", torch.bfloat16)
    layout = Fp8Format(strategy=strategy, block=(32, 64))
    convert_to_fp8(half, tmp_path / "fp8", layout)
    held = load_all(tmp_path / "fp8")
    (tmp_path / "fp8" / "model.safetensors.index.json").unlink()
    names = sorted(held)  # scales in another file than their weights
    for number, some in enumerate((names[::2], names[1::2])):
        part = {name: held[name] for name in some}
        save_file(part, tmp_path / "fp8" / f"part-{number}.safetensors", metadata={"format": "pt"})
    (tmp_path / "fp8" / "model.safetensors").unlink()
    merge_lora(str(tmp_path / "fp8"), str(adapter), str(tmp_path / "merged"))
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    found, adapters = load_all(tmp_path / "merged"), load_all(adapter)
    assert found.keys() == load_all(half).keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    for name in [name for name, tensor in held.items() if tensor.dtype == torch.float8_e4m3fn]:
        scale = held[name + ("_scale_inv" if strategy == "block" else "_scale")]
        for dimension, size in enumerate(layout.block if strategy == "block" else ()):
            scale = scale.repeat_interleave(size, dimension)
        rows, columns = held[name].shape
        scale = scale[:rows, :columns] if strategy == "block" else scale
        weight = (held[name].float() * scale).to(torch.bfloat16).float()
        a, b = (adapters[form.format(name.removesuffix(".weight"))] for form in (A, B))
        torch.testing.assert_close(found[name], (weight + 2 * b @ a).to(torch.bfloat16))


# ---- what is refused


def refusal(base: Path, adapter: Path, output: Path) -> str:
    with pytest.raises(UserError) as error:
        merge_lora(str(base), str(adapter), str(output))
    assert "\n" not in str(error.value)
    assert not list(output.parent.glob(output.name + "*"))
    return str(error.value)


def test_pickles_are_never_read(base, adapter, tmp_path):
    marker, file = tmp_path / "harmed", adapter / "adapter_model.safetensors"
    weights = file.read_bytes()
    file.unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    assert "has no adapter_model.safetensors" in refusal(base, adapter, tmp_path / "out")
    file.write_bytes(pickle.dumps(Payload(marker)))
    assert "is not a safetensors file" in refusal(base, adapter, tmp_path / "out")
    file.write_bytes(weights)
    old = Path(shutil.copytree(base, tmp_path / "old"))
    for part in old.glob("*.safetensors"):
        part.unlink()
    (old / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    assert "has no safetensors files" in refusal(old, adapter, tmp_path / "out")
    assert not marker.exists()


def change(adapter: Path, **fields: object) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 0}, "r must be an integer above 0"),
        ({"r": -4}, "r must be an integer above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number above 0, not nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number above 0, not inf"),
        ({"r": float("inf")}, "r must be an integer above 0, not inf"),
        ({"target_modules": None}, "target_modules must be a list of names"),
        ({"target_modules": [1, 2]}, "target_modules must be a list of names"),
        ({"r": 8}, "lora_A.weight is [4, "),
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "only LORA"),
    ],
)
def test_settings_that_cannot_be_merged(base, adapter, tmp_path, fields, words):
    change(adapter, **fields)
    assert words in refusal(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{", "\udcff"])
def test_settings_that_are_no_settings(base, adapter, tmp_path, text):
    (adapter / "adapter_config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "adapter_config.json cannot be read" in refusal(base, adapter, tmp_path / "out")


A, B = "base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("model.layers.9.self_attn.q_proj", "model.layers.9.self_attn.q_proj is no linear module"),
        ("../../outside", "../../outside is no linear module of --base"),
        ("/etc/passwd", "/etc/passwd is no linear module of --base"),
        ("model.norm", "model.norm is no linear module of --base"),
        ("model.embed_tokens", "model.embed_tokens is no linear module of --base"),
    ],
)
def test_modules_that_the_base_does_not_have(base, adapter, tmp_path, module, words):
    file = adapter / "adapter_model.safetensors"
    extra = {A.format(module): torch.ones(4, 64), B.format(module): torch.ones(64, 4)}
    save_file({**load_file(file), **extra}, file)
    assert words in refusal(base, adapter, tmp_path / "out")


def test_tensors_of_other_shapes_or_kinds(base, adapter, tmp_path):
    file = adapter / "adapter_model.safetensors"
    whole = load_file(file)
    for name, tensor, words in (
        (A.format(QUERY), torch.ones(4, 65), "is [4, 65] there and should be [4, 64]"),
        (B.format(QUERY), torch.ones(4), "is [4] there"),
        (A.format(QUERY)[:-6] + "default.weight", torch.ones(4, 64), "should be absent"),
        ("base_model.model.lm_head.weight", torch.ones(320, 64), "should be absent"),
        (A.format(QUERY), torch.full((4, 64), torch.nan), "values that are not finite"),
    ):
        save_file({**whole, name: tensor}, file)
        message = refusal(base, adapter, tmp_path / "out")
        assert words in message and "--hf-checkpoint" not in message
    del whole[B.format(QUERY)]
    save_file(whole, file)
    assert "is absent there" in refusal(base, adapter, tmp_path / "out")


@pytest.mark.parametrize("model_type", ["mixtral", "kimi_linear"])
def test_experts_are_merged_or_refused(tmp_path, model_type):
    """Experts named w1, w2, w3 are known of some model types; of others no weight may be left out in silence."""
    base, experts = tmp_path / "base", "model.layers.1.mlp.experts"
    stored = "model.layers.1.block_sparse_moe.experts"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": model_type}))
    shapes = {"w1": (6, 8), "w3": (6, 8), "w2": (8, 6)}
    weights = {
        f"{stored}.{n}.{name}.weight": torch.randn(s)
        for n in range(2)
        for name, s in shapes.items()
    }
    weights |= {f"{QUERY}.weight": torch.randn(8, 8)}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    config = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "experts"))
    adapters = {
        f"{QUERY}.lora_A.weight": torch.randn(2, 8),
        f"{QUERY}.lora_B.weight": torch.randn(8, 2),
        f"{experts}.gate_up_proj.lora_A.weight": torch.randn(2, 2, 8),
        f"{experts}.gate_up_proj.lora_B.weight": torch.randn(2, 12, 2),
        f"{experts}.down_proj.lora_A.weight": torch.randn(2, 2, 6),
        f"{experts}.down_proj.lora_B.weight": torch.randn(2, 8, 2),
    }
    write_peft_folder(str(tmp_path / "peft"), config, str(base), to_peft(adapters.items()))
    output = tmp_path / "merged"
    if model_type != "mixtral":
        assert f"--base has no weight of {experts}.0.down_proj" in refusal(
            base, tmp_path / "peft", output
        )
        return
    assert merge_lora(str(base), str(tmp_path / "peft"), str(output)) == 7
    found = load_all(output)
    for expert in range(2):
        gate_up, down = (
            2
            * adapters[f"{experts}.{leaf}.lora_B.weight"][expert]
            @ adapters[f"{experts}.{leaf}.lora_A.weight"][expert]
            for leaf in ("gate_up_proj", "down_proj")
        )
        for name, change in (("w1", gate_up[:6]), ("w3", gate_up[6:]), ("w2", down)):
            name = f"{stored}.{expert}.{name}.weight"
            torch.testing.assert_close(found[name], weights[name] + change)
    assert not found[f"{QUERY}.weight"].equal(weights[f"{QUERY}.weight"])


def test_an_index_that_leaves_its_folder(base, adapter, tmp_path):
    shards = copy_of(base, tmp_path / "shards", torch.float32, max_shard_size="60KB")
    file = shards / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    outside = tmp_path / "elsewhere.safetensors"
    shutil.copy(next(iter(shards.glob("*.safetensors"))), outside)
    for name in ("../elsewhere.safetensors", str(outside), 5, "", ".."):
        first = next(iter(index["weight_map"]))
        file.write_text(json.dumps({"weight_map": {**index["weight_map"], first: name}}))
        message = refusal(shards, adapter, tmp_path / "out")
        assert "is not a file of its folder" in message or "is not a weight index" in message


def test_files_that_the_index_does_not_name_are_not_merged(base, adapter, tmp_path):
    shards = copy_of(base, tmp_path / "shards", torch.float32, max_shard_size="60KB")
    save_file({f"{QUERY}.weight": torch.zeros(64, 64)}, shards / "a_stray_file.safetensors")
    merge_lora(str(shards), str(adapter), str(tmp_path / "out"))
    merge_lora(str(base), str(adapter), str(tmp_path / "plain"))
    found, expected = load_all(tmp_path / "out"), load_all(tmp_path / "plain")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_bases_that_cannot_be_merged_into(base, adapter, tmp_path):
    fp8 = Path(shutil.copytree(base, tmp_path / "fp8"))
    (file,) = fp8.glob("*.safetensors")
    weights = load_file(file)
    for name in [n for n in weights if n.endswith("proj.weight")]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, file)
    message = refusal(fp8, adapter, tmp_path / "out")
    assert "float8_e4m3fn weights and config.json no quantization_config: give the" in message
    (fp8 / "config.json").unlink()
    assert "has no config.json" in refusal(fp8, adapter, tmp_path / "out")
    assert "has no safetensors files" in refusal(tmp_path / "none", adapter, tmp_path / "out")


def test_the_output_is_neither_base_nor_adapter(base, adapter):
    for flag, folder in (("--base", base), ("--adapter", adapter)):
        with pytest.raises(UserError, match=f"is the folder of {flag}: name a new one"):
            merge_lora(str(base), str(adapter), str(folder / ".." / folder.name))
    assert (base / "config.json").exists() and (adapter / "adapter_config.json").exists()
