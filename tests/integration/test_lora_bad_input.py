"""Wrong adapters and settings of LoRA: one sentence from a start and from --dry-run, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import train
from tests.args import make_argv
from tests.tiny import make_tiny_checkpoint

QUERY = "base_model.model.model.layers.{}.self_attn.q_proj"
DETERMINISTIC = {"sglang_enable_deterministic_inference": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


def write_adapter(folder: Path, *, width: int = 64, layers: int = 2, out: int = 64) -> str:
    """An adapter of rank 4 for the queries of a model with this hidden size."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    tensors = {}
    for layer in range(layers):
        tensors[QUERY.format(layer) + ".lora_A.weight"] = torch.ones(4, width)
        tensors[QUERY.format(layer) + ".lora_B.weight"] = torch.ones(out, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def refused(model: str, tmp_path: Path, capsys, **flags: object) -> str:
    """The sentence, whether the run would start or not."""
    argv = make_argv(hf_checkpoint=model, run_dir=str(tmp_path / "run"), **flags)
    before = sorted(tmp_path.rglob("*"))
    sentences = []
    for words in ([], ["--dry-run"]):
        assert train.main([*argv, *words]) in (1, 2)  # wrong files, wrong flags
        sentences.append(capsys.readouterr().err.strip().splitlines()[-1])
    assert sentences[0] == sentences[1]
    assert sorted(tmp_path.rglob("*")) == before
    return sentences[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lora_target_modules": ["c_attn"]}, "c_attn is no linear module of the model, which has"),
        ({"lora_target_modules": ["q_proj", "norm"]}, "norm is no linear module"),
        ({"lora_target_modules": ["all-linear", "q_proj"]}, "all-linear includes the others"),
        ({"lora_dropout": 0.1, **DETERMINISTIC}, "--lora-dropout 0.1 makes"),
        ({"freeze_params_name_list": ["mlp"]}, "--freeze-params-name-list with --lora-rank"),
        ({"save": "x", "lora_rank": 0}, "--lora-rank must be at least 1"),
    ],
)
def test_settings(model, tmp_path, capsys, flags, words):
    assert words in refused(model, tmp_path, capsys, **{"lora_rank": 4, **flags})


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"width": 96}, "q_proj.lora_A.weight is [4, 96] there and should be [4, 64]"),
        ({"out": 128}, "q_proj.lora_B.weight is [128, 4] there and should be [64, 4]"),
        ({"layers": 1}, "layers.1.self_attn.q_proj.lora_A.weight is absent there"),
        ({"layers": 3}, "should be absent"),
    ],
)
def test_an_adapter_of_another_base(model, tmp_path, capsys, sizes, words):
    path = write_adapter(tmp_path / "adapter", **sizes)
    said = refused(model, tmp_path, capsys, lora_adapter_path=path)
    assert "adapter of another base than --hf-checkpoint" in said and words in said


def test_another_rank_or_alpha_than_the_adapters(model, tmp_path, capsys):
    path = write_adapter(tmp_path / "adapter")
    for flags, words in (
        ({"lora_rank": 8}, "--lora-rank 8 disagrees with adapter_config.json"),
        ({"lora_alpha": 16}, "--lora-alpha 16.0 disagrees"),
        ({"lora_use_rslora": True}, "--lora-use-rslora True disagrees"),
        ({"lora_target_modules": ["k_proj"]}, "--lora-target-modules k_proj disagrees"),
    ):
        assert words in refused(model, tmp_path, capsys, lora_adapter_path=path, **flags)


def test_folders_that_hold_no_adapter(model, tmp_path, capsys):
    path = Path(write_adapter(tmp_path / "adapter"))
    weights = path / "adapter_model.safetensors"
    weights.rename(path / "adapter_model.bin")
    said = refused(model, tmp_path, capsys, lora_adapter_path=str(path))
    assert "has no adapter_model.safetensors" in said
    weights.write_bytes(b"\x80\x04 a pickle")
    assert "is not a safetensors file" in refused(
        model, tmp_path, capsys, lora_adapter_path=str(path)
    )
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 0}')
    said = refused(model, tmp_path, capsys, lora_adapter_path=str(path))
    assert "--lora-adapter-path: adapter_config.json: r must be an integer above 0, not 0" in said
