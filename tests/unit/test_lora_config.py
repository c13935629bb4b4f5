"""The flags of LoRA, PEFT's adapter_config.json, and everything that is refused before a start."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.config.engine_groups import ServedModel, ServerGroup, engines_of
from slime.config.lora import LoraConfig, check_lora_files, check_lora_resume, served_adapter
from slime.config.peft_files import bound_modules, linear_modules, peft_modules
from slime.core.errors import ConfigError, UserError
from tests.args import make_args

LORA = {"lora_rank": 4, "lora_merge_for_rollout": True}
ADAPTED = {**LORA, "train_backend": "megatron", "lora_target_modules": ["experts"]}
# Two layers of a dense model.
SHAPES = {
    "model.embed_tokens.weight": [320, 64],
    "lm_head.weight": [320, 64],
    **{
        f"model.layers.{layer}.{module}.weight": shape
        for layer in range(2)
        for module, shape in {
            "input_layernorm": [64],
            "self_attn.q_proj": [96, 64],
            "self_attn.o_proj": [64, 96],
            "mlp.down_proj": [64, 128],
        }.items()
    },
}
LINEAR = [n.removesuffix(".weight") for n, s in SHAPES.items() if len(s) == 2 and "layers" in n]


TWO_RANKS = {
    "rollout_engine": "sglang",
    "rollout_num_gpus": 2,
    "rollout_num_gpus_per_engine": 2,
    "sglang_dp_size": 2,
    "sglang_enable_dp_attention": True,
}


@pytest.fixture(autouse=True)
def sglang_somewhere(monkeypatch, tmp_path):
    """An interpreter that says it has SGLang: the checks ask it for its version and nothing else."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.23\n")
    python.chmod(0o755)
    monkeypatch.setenv("SLIME_SGLANG_PYTHON", str(python))


def refusal(**overrides: object) -> str:
    with pytest.raises(ConfigError) as error:
        make_args(**overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"lora_alpha": 16}, ["--lora-alpha needs --lora-rank"]),
        ({"lora_merge_for_rollout": True}, ["--lora-merge-for-rollout needs --lora-rank"]),
        ({"lora_rank": 0}, ["--lora-rank must be at least 1"]),
        ({**LORA, "lora_alpha": 0}, ["--lora-alpha must be above 0"]),
        ({**LORA, "lora_dropout": 1}, ["--lora-dropout must be between 0 and 0.99"]),
        (
            {"lora_rank": 4, "ref_load": ".", "rollout_engine": "sglang"},
            ["--ref-load", "--lora-merge-for-rollout"],
        ),
        (
            {"lora_rank": 4, "sglang_enable_lora": False},
            ["--no-sglang-enable-lora", "--lora-merge-for-rollout"],
        ),
        (
            {"lora_rank": 8, "sglang_max_lora_rank": 4},
            ["--sglang-max-lora-rank 4", "--lora-merge-for-rollout"],
        ),
        (
            {"lora_rank": 8, **TWO_RANKS},
            ["--sglang-enable-dp-attention", "--lora-merge-for-rollout"],
        ),
        (
            {
                **LORA,
                "train_backend": "megatron",
                "mtp_num_layers": 1,
                "enable_mtp_training": True,
            },
            ["--enable-mtp-training with --lora-rank", "have no adapters"],
        ),
        (
            {**LORA, "lora_dropout": 0.1, "sglang_enable_deterministic_inference": True},
            ["--lora-dropout 0.1", "--sglang-enable-deterministic-inference"],
        ),
        ({**LORA, "lora_target_modules": ["all-linear", "q_proj"]}, ["all-linear includes"]),
        ({**LORA, "freeze_params_name_list": ["mlp"]}, ["--freeze-params-name-list"]),
        ({**LORA, "only_train_params_name_list": ["mlp"]}, ["--only-train-params-name-list"]),
        (
            {**LORA, "ref_update_interval": 2, "use_kl_loss": True},
            ["--ref-update-interval", "base with its adapters off"],
        ),
        ({**LORA, "lora_adapter_path": "/nowhere"}, ["--lora-adapter-path: /nowhere"]),
        (
            {**ADAPTED, "transformer_impl": "transformer_engine"},
            ["--transformer-impl transformer_engine with --lora-target-modules experts", "local"],
        ),
        (
            {**LORA, "train_backend": "megatron", "optimizer_cpu_offload": True},
            ["--optimizer-cpu-offload with --lora-rank", "--use-precision-aware-optimizer"],
        ),
        (
            {**ADAPTED, "optimizer": "muon"},
            ["--optimizer muon with --lora-target-modules experts", "--optimizer adam"],
        ),
    ],
)
def test_flags_that_are_refused(flags, words):
    message = refusal(**flags)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"colocate": True},
        {"actor_num_nodes": 2},
        {"ref_load": "."},
        {"rollout_engine": "sglang"},
        {"rollout_engine": "sglang", "colocate": True},
    ],
    ids=lambda flags: " ".join(flags) or "apart",
)
def test_engines_are_started_for_adapters(flags):
    args = make_args(lora_rank=12, **flags)
    assert (served_adapter(args), args.sglang_enable_lora, args.sglang_max_lora_rank) == (
        "slime",
        True,
        12,
    )
    # SGLang loses what it releases; embedded engines keep it in host memory.
    backup = args.rollout_engine == "sglang" and args.colocate
    assert bool(args.sglang_enable_weights_cpu_backup) == backup
    merged = make_args(lora_merge_for_rollout=True, lora_rank=12, **flags)
    assert served_adapter(merged) is None and not merged.sglang_enable_lora


def test_engines_of_somebody_else_are_asked_for_the_adapter():
    args = make_args(lora_rank=4, rollout_external_engine_addrs=["127.0.0.1:9"])
    assert served_adapter(args) == "slime" and not args.sglang_enable_lora


def test_engines_of_a_frozen_model_have_no_slots():
    frozen, trained = (
        ServedModel(
            name=name,
            model_path=path,
            update_weights=name == "actor",
            groups=(ServerGroup(worker_type="regular", num_gpus=1, num_gpus_per_engine=1),),
        )
        for name, path in (("judge", "/models/judge"), ("actor", "."))
    )
    args = make_args(lora_rank=4).replace(engine_models=[trained, frozen], rollout_num_gpus=2)
    first, second = engines_of(args)
    assert (first.args.sglang_enable_lora, first.args.sglang_max_lora_rank) == (True, 4)
    assert (second.args.sglang_enable_lora, second.args.sglang_max_lora_rank) == (None, None)


def test_training_without_engines_needs_no_merging():
    rows = {"load_debug_rollout_data": "rows_{rollout_id}.pt"}
    assert make_args(lora_rank=4, **rows).lora_rank == 4
    assert LoraConfig.of(make_args()) is None


def test_scaling_is_alpha_over_rank_or_its_root():
    assert LoraConfig(rank=16, alpha=32).scaling == 2
    assert LoraConfig(rank=16, alpha=32, use_rslora=True).scaling == 32 / math.sqrt(16)


def test_targets_are_ends_of_names():
    def targets(*names: str) -> list[str]:
        return LoraConfig(rank=4, alpha=8, target_modules=names).targets([*LINEAR, "lm_head"])

    assert targets("all-linear") == LINEAR
    assert targets("q_proj") == [n for n in LINEAR if n.endswith("q_proj")]
    assert targets("layers.1.mlp.down_proj") == ["model.layers.1.mlp.down_proj"]
    with pytest.raises(ConfigError, match="has q_proj, o_proj, down_proj, lm_head"):
        targets("q_proj", "proj")
    with pytest.raises(ConfigError, match="the LM head cannot have an adapter"):
        targets("lm_head")


def test_unknown_modules_are_refused_from_the_files_alone():
    assert linear_modules(SHAPES) == (["lm_head", *LINEAR], [])
    args = make_args(**LORA, lora_target_modules=["q_proj", "k_proj"])
    with pytest.raises(ConfigError, match=r"k_proj is no linear module.*o_proj.*down_proj"):
        check_lora_files(args, SHAPES)
    check_lora_files(make_args(**LORA), SHAPES)


EXPERTS = {
    f"model.layers.0.mlp.experts.{expert}.{part}.weight": shape
    for expert in range(3)
    for part, shape in {"gate_proj": [24, 64], "up_proj": [24, 64], "down_proj": [64, 24]}.items()
}


def test_experts_are_named_by_the_parameters_that_hold_them():
    shapes = {**SHAPES, **EXPERTS}
    linear, experts = linear_modules(shapes)
    gate_up, down = (f"model.layers.0.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj"))
    assert (linear, experts) == (["lm_head", *LINEAR], [gate_up, down])

    def targets(*names: str) -> list[str]:
        return LoraConfig(rank=4, alpha=8, target_modules=names).targets(linear, experts)

    dense = [n for n in LINEAR if n.endswith("down_proj")]
    assert targets("all-linear") == LINEAR
    assert targets("all-linear", "experts") == [*LINEAR, gate_up, down]
    assert targets("experts") == targets("mlp.experts") == [gate_up, down]
    assert targets("gate_up_proj") == [gate_up]
    assert targets("down_proj") == [*dense, down]
    assert targets("experts.down_proj") == [down]
    for half in ("gate_proj", "up_proj"):
        with pytest.raises(ConfigError, match="name gate_up_proj, or experts"):
            targets("q_proj", half)
    with pytest.raises(ConfigError, match=r"k_proj is no linear module.*gate_up_proj, experts"):
        targets("k_proj")
    with pytest.raises(
        ConfigError, match=r"--lora-dropout 0.1.*no dropout for adapters of experts"
    ):
        LoraConfig(rank=4, alpha=8, dropout=0.1, target_modules=("experts",)).targets([], experts)
    check_lora_files(make_args(**LORA, lora_target_modules=["all-linear", "experts"]), shapes)


def test_the_gate_of_a_shared_expert_has_no_adapter_on_megatron():
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    shapes = {f"{name}.weight": [8, 8] for name in LINEAR} | EXPERTS | {gate: [1, 8]}
    every = {**LORA, "lora_target_modules": ["all-linear", "experts"]}
    check_lora_files(make_args(**every), shapes)
    with pytest.raises(ConfigError, match=r"includes shared_expert_gate.*--train-backend fsdp"):
        check_lora_files(make_args(**every, train_backend="megatron"), shapes)
    check_lora_files(make_args(**{**ADAPTED, "lora_target_modules": ["q_proj", "experts"]}), shapes)


def test_experts_with_adapters_are_those_of_slimes_layers():
    assert make_args(**ADAPTED).transformer_impl == "local"
    linear = {**ADAPTED, "lora_target_modules": ["q_proj"]}
    assert make_args(**linear).transformer_impl is None


def test_gate_up_proj_of_a_dense_model_is_a_linear_module(tmp_path):
    """GLM-4's; TransformerEngine's layers, Muon and SGLang take adapters of it."""
    (tmp_path / "config.json").write_text('{"model_type": "glm4", "num_hidden_layers": 2}')
    flags = {**ADAPTED, "hf_checkpoint": str(tmp_path), "lora_target_modules": ["gate_up_proj"]}
    assert make_args(**flags).transformer_impl is None
    assert make_args(**flags | {"rollout_engine": "sglang", "lora_merge_for_rollout": False})
    assert make_args(**flags, optimizer="muon").transformer_impl is None
    odd = {"num_hidden_layers": 2, "num_experts": "many", "text_config": ["no settings"]}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    assert make_args(**flags).transformer_impl is None
    for model_type, key in (("qwen3_moe", "num_experts"), ("ernie4_5_moe", "moe_num_experts")):
        sparse = {"model_type": model_type, "num_hidden_layers": 2, key: 4}
        (tmp_path / "config.json").write_text(json.dumps(sparse))
        for target in ("gate_up_proj", "down_proj"):
            served = {**LORA, "lora_merge_for_rollout": False, "rollout_engine": "sglang"}
            served |= {"hf_checkpoint": str(tmp_path), "lora_target_modules": [target]}
            assert "only embedded engines" in refusal(**served)


def test_full_names_beside_a_vision_tower():
    """Names of the flags are those of the text model; tensors and targets of the folder are nested."""
    targets = ("model.layers.0.self_attn.q_proj", "v_proj")
    nested = [f"model.language_model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj")]
    config = LoraConfig(rank=4, alpha=8, target_modules=targets)
    assert config.to_peft("base", nested)["target_modules"] == [nested[0], "v_proj"]
    flat = [name.replace("language_model.", "") for name in nested]
    assert config.to_peft("base", flat)["target_modules"] == [flat[0], "v_proj"]


def test_experts_in_pefts_files():
    """With both parameters the inner wrapper of gate_up_proj is called base_layer."""
    experts = "model.layers.0.mlp.experts"
    both, one = [f"{experts}.gate_up_proj", f"{experts}.down_proj"], [f"{experts}.gate_up_proj"]
    config = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "experts"))
    assert config.tensor_shapes([LINEAR[0], *both], {**SHAPES, **EXPERTS}) == {
        f"{LINEAR[0]}.lora_A.weight": [4, 64],
        f"{LINEAR[0]}.lora_B.weight": [96, 4],
        f"{experts}.base_layer.lora_A.weight": [12, 64],
        f"{experts}.base_layer.lora_B.weight": [48, 12],
        f"{experts}.lora_A.weight": [12, 24],
        f"{experts}.lora_B.weight": [64, 12],
    }
    fields = config.to_peft("base", peft_modules([LINEAR[0], *both]).values())
    assert fields["target_modules"] == ["q_proj"]
    assert fields["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    assert list(peft_modules(one).values()) == [experts]
    alone = LoraConfig(rank=4, alpha=8, target_modules=("gate_up_proj",))
    fields = alone.to_peft("base", [experts])
    assert (fields["target_modules"], fields["target_parameters"]) == ([], ["experts.gate_up_proj"])
    for modules in (both, one, both[1:], [LINEAR[0], *both]):
        names = peft_modules(modules)
        parameters = [m.removeprefix("model.layers.0.mlp.") for m in modules if "experts" in m]
        assert bound_modules(names.values(), parameters) == {v: k for k, v in names.items()}
    with pytest.raises(ConfigError, match="need target_parameters"):
        bound_modules([experts], ["router.weight"])


# ---- a PEFT folder to start from


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    write_weights(tmp_path, LINEAR)
    return tmp_path


def write_weights(folder: Path, modules: list[str], rank: int = 4, extra: int = 0) -> None:
    tensors = {}
    for module in (name for name in modules if name.endswith("q_proj")):
        rows, columns = SHAPES[f"{module}.weight"]
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.ones(rank, columns + extra)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.ones(rows, rank)
    save_file(tensors, folder / "adapter_model.safetensors")


def change(folder: Path, **fields: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_rank_alpha_and_modules_come_from_the_folder(adapter):
    change(adapter, use_rslora=True, lora_dropout=0.25, rank_pattern={r".*\.gate_up_proj": 9})
    args = make_args(lora_adapter_path=str(adapter), lora_merge_for_rollout=True)
    expected = LoraConfig(
        rank=4, alpha=6, dropout=0.25, target_modules=("q_proj",), use_rslora=True
    )
    assert LoraConfig.of(args) == expected
    check_lora_files(args, SHAPES)
    change(adapter, target_modules=r".*q_proj")  # a pattern: the tensors say what it matched
    args = make_args(lora_adapter_path=str(adapter), lora_merge_for_rollout=True)
    assert args.lora_target_modules == [n for n in LINEAR if n.endswith("q_proj")]
    change(adapter, target_modules=["q_proj"], layers_to_transform=[0, 1])  # likewise
    args = make_args(lora_adapter_path=str(adapter), lora_merge_for_rollout=True)
    assert args.lora_target_modules == [n for n in LINEAR if n.endswith("q_proj")]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 9}}, "rank_pattern"),
        (
            {"target_parameters": ["q_proj"], "rank_pattern": {r".*\.q_proj": 9}},
            "rank_pattern",
        ),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"r": "four"}, "r must be an integer above 0, not four"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow"),
    ],
)
def test_other_kinds_of_adapters_are_refused(adapter, fields, words):
    change(adapter, **fields)
    assert words in refusal(lora_adapter_path=str(adapter), lora_merge_for_rollout=True)


def test_flags_that_disagree_with_the_folder_are_refused(adapter):
    given = {"lora_adapter_path": str(adapter), "lora_merge_for_rollout": True}
    assert "--lora-rank 8 disagrees" in refusal(**given, lora_rank=8)
    assert "--lora-alpha 8.0 disagrees" in refusal(**given, lora_alpha=8)
    assert make_args(**given, lora_rank=4, lora_alpha=6).lora_rank == 4


def test_damaged_folders_are_refused(adapter):
    given = {"lora_adapter_path": str(adapter), "lora_merge_for_rollout": True}
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "but its header says" in refusal(**given)
    file.write_bytes((1 << 62).to_bytes(8, "little"))
    assert "is not a safetensors file" in refusal(**given)
    file.unlink()
    assert "has no adapter_model.safetensors" in refusal(**given)
    (adapter / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refusal(**given)


def test_an_adapter_of_another_base_is_refused(adapter):
    args = make_args(lora_adapter_path=str(adapter), lora_merge_for_rollout=True)
    for modules, extra in ((LINEAR, 8), (LINEAR[:1], 0)):
        write_weights(adapter, modules, extra=extra)
        with pytest.raises(UserError, match=r"adapter of another base.*q_proj\.lora_A"):
            check_lora_files(args, SHAPES)


# ---- resuming


def test_resuming_with_other_adapters_is_refused(tmp_path):
    def resume(saved: dict | None, **flags: object) -> None:
        (tmp_path / "trainer.json").write_text(json.dumps({"lora": saved}))
        check_lora_resume(make_args(**flags), tmp_path)

    saved = {"rank": 4, "alpha": 8.0, "use_rslora": False, "dropout": 0.0}
    resume(saved | {"experts_shared_outer": True}, **LORA, lora_experts_shared_outer=True)
    resume(saved, **LORA, lora_dropout=0.1)
    resume(None)
    for flags, words in (
        ({**LORA, "lora_rank": 8}, "--lora-rank 4, this run has 8"),
        ({**LORA, "lora_alpha": 4}, "--lora-alpha 8.0, this run has 4.0"),
        ({**LORA, "lora_use_rslora": True}, "--lora-use-rslora False"),
        ({**LORA, "lora_experts_shared_outer": True}, "--lora-experts-shared-outer False"),
        ({}, "with --lora-rank 4 adapters, this run has none"),
    ):
        with pytest.raises(UserError, match=words):
            resume(saved, **flags)
    with pytest.raises(UserError, match="saved without adapters, this run has --lora-rank 4"):
        resume(None, **LORA)
