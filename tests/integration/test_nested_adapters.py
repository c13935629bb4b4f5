"""Adapters that `peft` made of a published Qwen3.5, of its text model or beside the vision tower.

The first is named after model.layers.0, the second after model.language_model.layers.0; the tensors of
the checkpoint are nested. Both are trained, exported, merged and served.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from slime.config.lora import LoraConfig as OwnConfig
from slime.config.lora import check_lora_files
from slime.config.peft_files import decoder_shapes, flat_name, linear_modules, nested_name
from slime.core.errors import ConfigError
from slime.engine.scheduler.sampling_params import RequestError
from slime.rollout.train_data import split_batch
from slime.weights.peft_folder import initial_a, merge_lora
from tests import fsdp, megatron
from tests.adapters import peft_log_probs
from tests.args import make_args
from tests.delta_nets import FAMILIES, load_all, publish
from tests.engines import local_engine
from tests.fsdp import Case
from tests.peft_runs import BUDGET, peft_outcome
from tests.rank_pool import run_fsdp_ranks, run_megatron_ranks
from tests.tiny import make_tiny_checkpoint
from tests.tiny_vision import make_image_rows, make_vision_checkpoint

TEXT, WHOLE = AutoModelForCausalLM, AutoModelForImageTextToText
MODULES = {"target_modules": ["q_proj", "in_proj_qkv", "o_proj"]}
NO_TOWER = {"target_modules": "all-linear", "exclude_modules": r".*(visual|lm_head).*"}
ONE = {"target_modules": r".*layers\.1\.self_attn\.q_proj"}  # a pattern: only the tensors tell
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
KINDS = {"modules": MODULES, "all": NO_TOWER, "one": ONE, "experts": EXPERTS}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tiny = {
        family: str(make_tiny_checkpoint(folder / "tiny" / family, family, weight_scale=3.0))
        for family in FAMILIES
    }
    return publish(tiny, folder)


def adapt(model: str, folder: Path, family: Any, **options: Any) -> Path:
    """Write an adapter of this class of model whose A and B are not zero."""
    torch.manual_seed(3)
    peft = get_peft_model(family.from_pretrained(model), LoraConfig(r=2, lora_alpha=6, **options))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2 / math.sqrt(2))
    peft.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize("family", [TEXT, WHOLE])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "qwen3_5") for kind in ("modules", "all", "one")),
        *(("experts", name) for name in ("qwen3_5_moe", "qwen3_5_moe_unfused")),
    ],
)
def test_merged_weights_are_those_of_peft(models, tmp_path, kind, name, family):
    adapter = adapt(models[name], tmp_path / "peft", family, **KINDS[kind])
    assert merge_lora(models[name], str(adapter), str(tmp_path / "merged")) > 0
    base = family.from_pretrained(models[name])
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    found = family.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == expected.keys()
    for tensor, weight in expected.items():
        torch.testing.assert_close(found[tensor], weight, rtol=2e-6, atol=2e-6, msg=tensor)
    before, after = load_all(models[name]), load_all(str(tmp_path / "merged"))
    assert before.keys() == after.keys() and before.keys() > {
        "model.visual.patch_embed.proj.weight"
    }
    assert any(not before[tensor].equal(after[tensor]) for tensor in before)


@pytest.mark.parametrize("family", [TEXT, WHOLE])
@pytest.mark.parametrize(("kind", "name"), [("all", "qwen3_5"), ("experts", "qwen3_5_moe")])
def test_the_engine_serves_what_peft_computes(models, tmp_path, kind, name, family):
    adapter = adapt(models[name], tmp_path / "peft", family, **KINDS[kind])
    text = rename(adapter, tmp_path / "text", flat_name)
    with local_engine(
        models[name], lora_paths=(("a", str(adapter)),), skip_tokenizer_init=True
    ) as engine:
        (request,) = engine.generate([list(range(40, 70))], adapters=["a"], max_new_tokens=8)
    expected = peft_log_probs(Path(models[name]), text, request.token_ids)
    found = torch.tensor(request.output_log_probs)
    assert (found - expected[request.prompt_len - 1 :]).abs().max() < 1e-4


def rename(adapter: Path, folder: Path, name_of: Any) -> Path:
    """Copy an adapter with the names of the other class of model."""
    prefix = "base_model.model."
    held = load_file(adapter / "adapter_model.safetensors")
    folder.mkdir()
    renamed = {prefix + name_of(n.removeprefix(prefix)): t for n, t in held.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    if isinstance(fields["target_modules"], list):
        fields["target_modules"] = [name_of(target) for target in fields["target_modules"]]
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


# ---- training


def _train_fsdp(rank: int, cases: dict[str, Case], folder: str) -> dict[str, Any]:
    return {
        name: _outcome(fsdp.start_actor(case.args(), rank, 1), case, f"{folder}/{name}")
        for name, case in cases.items()
    }


def _train_megatron(rank: int, cases: dict[str, Case], folder: str) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        actor = megatron.start_actor(megatron.megatron_args(case, 1), rank, 1)
        found[name] = _outcome(actor, case, f"{folder}/{name}")
    return found


def _outcome(actor: Any, case: Case, folder: str) -> dict[str, torch.Tensor]:
    for rollout_id in range(2):
        (rows,) = split_batch(actor.args, case.rows(rollout_id), dp_size=1, cp_size=1)
        actor.train(rollout_id, rows)
    actor.export_hf(folder)
    return load_file(Path(folder) / "adapter_model.safetensors")


@pytest.mark.parametrize("ranks", [_train_fsdp, _train_megatron])
def test_runs_continue_adapters_under_either_name(models, tmp_path, ranks):
    """Two rollouts of a text run: the exported folder is what peft trains, under names of the text model."""
    model = models["qwen3_5"]
    text = adapt(model, tmp_path / "text", TEXT, **MODULES)
    one = adapt(model, tmp_path / "one", WHOLE, **ONE)
    paths = {"text": text, "nested": rename(text, tmp_path / "nested", nested_name), "one": one}
    flags = {name: {"lora_adapter_path": str(path)} for name, path in paths.items()}
    more = {**BUDGET, "lora_merge_for_rollout": True}
    cases = {name: Case(model=model, flags={**more, **flags[name]}) for name in paths}
    for case in cases.values():  # what a run checks before it starts
        check_lora_files(case.args(), decoder_shapes(model))
    run = run_fsdp_ranks if ranks is _train_fsdp else run_megatron_ranks
    found = run(ranks, 1, cases, str(tmp_path / "out"))[0]
    naive = {"text": peft_outcome(cases["text"])}
    naive["nested"] = naive["text"]
    single = rename(one, tmp_path / "single", flat_name)
    naive["one"] = peft_outcome(Case(model=model, flags={**more, "lora_adapter_path": str(single)}))
    for name, expected in naive.items():
        start = load_file(paths[name] / "adapter_model.safetensors")
        assert len(found[name]) == len(expected.weights) == len(start)
        for tensor, weight in expected.weights.items():
            exported = found[name][f"base_model.model.{tensor}"]
            torch.testing.assert_close(exported, weight, rtol=1e-4, atol=1e-5, msg=tensor)
    again = peft_log_probs(Path(model), tmp_path / "out" / "nested", list(range(30)))
    before = peft_log_probs(Path(model), text, list(range(30)))
    assert (again - before).abs().max() > 1e-4


@pytest.mark.parametrize("ranks", [_train_fsdp, _train_megatron])
def test_runs_with_images_export_nested_names(tmp_path, ranks):
    """The run starts from an adapter of the text model; peft loads its export beside the tower."""
    model = str(make_vision_checkpoint(tmp_path / "model", "qwen3_5"))
    text = adapt(model, tmp_path / "text", TEXT, **MODULES)
    nested = rename(text, tmp_path / "nested", nested_name)
    more = {**BUDGET, "lora_merge_for_rollout": True, "multimodal_keys": {"image": "images"}}
    case, naive = (
        Case(
            model=model,
            flags={**more, "lora_adapter_path": str(path)},
            make_rows=partial(make_image_rows, model),
        )
        for path in (text, nested)
    )
    run = run_fsdp_ranks if ranks is _train_fsdp else run_megatron_ranks
    found = run(ranks, 1, {"run": case}, str(tmp_path / "out"))[0]["run"]
    expected = {f"base_model.model.{n}": t for n, t in peft_outcome(naive).weights.items()}
    assert found.keys() == expected.keys()
    for tensor, weight in expected.items():
        torch.testing.assert_close(found[tensor], weight, rtol=1e-4, atol=1e-5, msg=tensor)


def test_a_new_adapter_does_not_depend_on_the_nesting():
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert initial_a(name, (2, 8), 0).equal(initial_a(nested_name(name), (2, 8), 0))
    assert not initial_a(name, (2, 8), 0).equal(initial_a(name, (2, 8), 1))


# ---- refusals


def test_an_adapter_of_the_tower_is_refused(models, tmp_path):
    every = adapt(models["qwen3_5"], tmp_path / "peft", WHOLE, target_modules="all-linear")
    for refused in (
        lambda: merge_lora(models["qwen3_5"], str(every), str(tmp_path / "merged")),
        lambda: OwnConfig.read(every),
    ):
        with pytest.raises(ConfigError, match=r"adapts the vision tower \(model\.visual\."):
            refused()


def test_one_module_under_two_names_is_refused(models, tmp_path):
    adapter = adapt(models["qwen3_5"], tmp_path / "peft", TEXT, **ONE)
    held = load_file(adapter / "adapter_model.safetensors")
    nested = {n.replace("model.layers", "model.language_model.layers"): t for n, t in held.items()}
    twice = {**held, **{name: tensor.clone() for name, tensor in nested.items()}}
    save_file(twice, adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"which are one"):
        OwnConfig.read(adapter)
    options = {"skip_tokenizer_init": True, "max_lora_rank": 2, "enable_lora": True}
    with local_engine(models["qwen3_5"], **options) as engine:
        fields = json.loads((adapter / "adapter_config.json").read_text())
        with pytest.raises(RequestError, match="two names"):
            engine.engine.lora.load_tensors("a", fields, twice, "1")


@pytest.mark.parametrize("pattern", ["language_model.layers.1.self_attn.q_proj", "q_proj"])
def test_a_rank_pattern_of_nested_names_is_refused(models, tmp_path, pattern):
    adapter = adapt(models["qwen3_5"], tmp_path / "peft", WHOLE, **MODULES)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rank_pattern": {pattern: 8}}))
    with pytest.raises(ConfigError, match="rank_pattern"):
        OwnConfig.read(adapter)


def test_experts_in_one_tensor_have_adapters_with_fsdp_only(models):
    shapes = decoder_shapes(models["qwen3_5_moe"])
    flags = {"lora_rank": 2, "lora_target_modules": ["experts"], "lora_merge_for_rollout": True}
    args = make_args(hf_checkpoint=models["qwen3_5_moe"], **flags)
    check_lora_files(args, shapes)
    with pytest.raises(ConfigError, match=r"mlp\.experts\.\w+_proj: experts that .* fsdp only"):
        check_lora_files(args.replace(train_backend="megatron"), shapes)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_linear_modules_of_a_published_folder_are_those_of_the_text_model(models, family):
    """MTP layers and the tower have none; experts are those of transformers' module."""
    hf = AutoModelForCausalLM.from_pretrained(models[family])
    linear = {n for n, m in hf.named_modules() if isinstance(m, torch.nn.Linear)}
    fused = {n: list(p.shape) for n, p in hf.named_parameters() if n.endswith(("gate_up_proj",))}
    found, experts = linear_modules(decoder_shapes(models[family]))
    routers = {name for name in found if name.endswith("mlp.gate")}
    assert set(found) - routers == linear and set(fused) <= set(experts)
