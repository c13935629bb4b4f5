"""Flags of scripts written for other versions of slime: honoured, or accepted with a warning."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.backends.base import first_weights, teacher_weights
from slime.config.arguments import parse_args
from slime.config.derive import portable
from slime.config.flags.former_names import FORMER_NAMES, FORMER_VALUES
from slime.config.flags.registry import options
from slime.core.errors import ConfigError, UserError
from slime.core.types import ParallelInfo
from slime.diagnosis.number_checks import check_numbers
from slime.runlog.checkpoint_folder import CheckpointFolder, CheckpointMeta
from slime.runlog.run_folder import write_config
from slime.weights.hf_folder import DiskTransport
from tests.args import make_args, make_argv

SFT = {
    "rollout_function_path": "slime.rollout.sft_rollout.generate_rollout",
    "loss_type": "sft_loss",
    "debug_train_only": True,
    "disable_compute_advantages_and_returns": True,
}
GLM4 = ["slime_plugins.models.glm4", "get_glm_spec"]


def warned(**overrides: object) -> str:
    return "\n".join(make_args(**overrides).warnings)


def refused(**overrides: object) -> str:
    with pytest.raises(ConfigError) as error:
        make_args(**overrides)
    return str(error.value)


def glm4_run(folder: Path, **overrides: object) -> dict[str, object]:
    config = {"model_type": "glm4", "num_hidden_layers": 2, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    return {"train_backend": "megatron", "hf_checkpoint": folder, **overrides}


def test_sequence_parallel_on_one_tensor_rank_is_a_warning():
    text = warned(train_backend="megatron", sequence_parallel=True)
    assert "--sequence-parallel has no effect with --tensor-model-parallel-size 1" in text


def test_a_kl_coefficient_without_the_kl_is_a_warning():
    assert "--kl-loss-coef has no effect without --use-kl-loss" in warned(kl_loss_coef=0.1)
    make_args(kl_coef=0.1, kl_loss_coef=0.1)


def test_the_number_of_rollouts_counts_where_epochs_are_given_too():
    args = make_args(num_rollout=7, num_epoch=3)
    assert args.num_rollout == 7
    assert any("--num-epoch 3 has no effect with --num-rollout 7" in text for text in args.warnings)


def test_addresses_of_engines_say_that_they_are_external():
    args = make_args(rollout_engine=None, rollout_external_engine_addrs=["a:1"])
    assert args.rollout_external and args.rollout_engine == "sglang" and args.rollout_num_gpus == 1


def test_nccl_is_the_distributed_transport(tmp_path):
    assert make_args(update_weight_transport="nccl").update_weight_transport == "distributed"
    (tmp_path / "run.yaml").write_text("update_weight_transport: nccl\n")
    assert make_args(config=tmp_path / "run.yaml").update_weight_transport == "distributed"


def test_a_chunk_of_all_tokens():
    assert make_args(log_probs_chunk_size=-1).log_probs_chunk_size > 10**9
    assert "--log-probs-chunk-size" in refused(log_probs_chunk_size=0)


def test_one_evaluation_file_is_named_by_its_stem(tmp_path, monkeypatch):
    (tmp_path / "aime-2024.jsonl").write_text('{"input": "1"}\n')
    monkeypatch.chdir(tmp_path)
    args = make_args(eval_interval=1, eval_prompt_data=["aime-2024.jsonl@[0:1]"])
    assert [(d.name, d.path) for d in args.eval_datasets] == [
        ("aime-2024", "aime-2024.jsonl@[0:1]")
    ]
    stored = portable({"eval_prompt_data": ["aime-2024.jsonl"]}, str(tmp_path / "run"))
    assert stored["eval_prompt_data"] == [str(tmp_path / "aime-2024.jsonl")]


def test_evaluation_settings_below_one_key(tmp_path):
    data = tmp_path / "aime.jsonl"
    data.write_text('{"input": "1"}\n')
    file = tmp_path / "eval.yaml"
    row = f"{{name: aime, path: {data}, n_samples_per_eval_prompt: 16}}"
    file.write_text(f"eval:\n  defaults: {{top_p: 0.7}}\n  datasets:\n    - {row}\n")
    (dataset,) = make_args(eval_interval=1, eval_config=file).eval_datasets
    assert (dataset.n_samples_per_prompt, dataset.top_p) == (16, 0.7)
    file.write_text(f"datasets:\n  - {row[:-1]}, n_samples_per_prompt: 2}}\n")
    assert "n_samples_per_prompt is given twice" in refused(eval_interval=1, eval_config=file)


def test_supervised_training_without_engines():
    args = make_args(**SFT)
    assert args.rollout_num_gpus == 0
    assert "--prompt-data is missing" in refused(**SFT, prompt_data=None)
    assert "--load-debug-rollout-data" in refused(debug_train_only=True)


def test_advantages_are_left_out_only_where_nothing_needs_them():
    flag = {"disable_compute_advantages_and_returns": True}
    assert "policy loss" in refused(**flag)
    make_args(**flag, custom_advantage_function_path="my.advantages")
    own_loss = {"loss_type": "custom_loss", "custom_loss_function_path": "my.loss"}
    make_args(**flag, **own_loss)
    assert "critic" in refused(**flag, **own_loss, advantage_estimator="ppo")


def test_a_layer_spec_of_the_models_family_is_accepted(tmp_path):
    make_args(**glm4_run(tmp_path, spec=GLM4))
    text = refused(**glm4_run(tmp_path, spec=["slime_plugins.models.qwen3_next", "get_spec"]))
    assert "model_type is glm4" in text and "--custom-model-provider-path" in text


def test_other_spellings_of_megatrons_flags(tmp_path):
    argv = make_argv(**glm4_run(tmp_path))
    switches = ["--no-check-for-nan-in-loss-and-grad", "--grad-reduce-in-bf16"]
    args = parse_args([*argv, *switches, "--no-position-embedding"])
    assert args.check_for_nan_in_grad is False
    assert args.accumulate_allreduce_grads_in_fp32 is False
    with pytest.raises(ConfigError, match="--add-position-embedding is not honoured"):
        parse_args([*argv, "--add-position-embedding"])


def test_flags_without_an_effect_say_why():
    flags = {
        "ref_micro_batch_size": 4,
        "rollout_data_transport": "ray",
        "keep_old_actor": True,
        "disable_wandb_random_suffix": True,
    }
    text = warned(**flags)
    for name in flags:
        assert f"--{name.replace('_', '-')} has no effect: " in text
    asynchronous = {"train_async": True, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
    assert "--use-rollout-logprobs" in refused(keep_old_actor=True, **asynchronous)
    assert "--use-rollout-logprobs" in refused(keep_old_actor=True, update_weights_interval=2)


@pytest.mark.parametrize("option", FORMER_NAMES)
def test_a_flag_of_another_version_is_refused_with_what_to_type(option):
    assert option not in options()
    with pytest.raises(ConfigError) as error:
        parse_args([*make_argv(), option, "1"])
    assert str(error.value) == f"there is no flag {option}: {FORMER_NAMES[option]}"


@pytest.mark.parametrize(("option", "value"), FORMER_VALUES)
def test_a_value_of_another_version_is_refused_with_what_to_type(option, value):
    flag = options()[option]
    assert value not in flag.choices
    text = refused(**{flag.name: value})
    assert text.startswith(f"{option}: '{value}' is not one of") and text.endswith(
        FORMER_VALUES[option, value]
    )


def test_details_are_dumped_into_one_folder(tmp_path):
    args = make_args(dump_details=tmp_path / "{odd}")
    filled = args.save_debug_rollout_data.format(rollout_id=3)
    assert filled == str(tmp_path / "{odd}" / "rollout_data" / "3.pt")
    filled = args.save_debug_train_data.format(rollout_id=3, rank=1)
    assert filled == str(tmp_path / "{odd}" / "train_data" / "3_1.pt")


def roles(tmp_path, text: str, **overrides: object):
    (tmp_path / "roles.yaml").write_text(text)
    path = tmp_path / "roles.yaml"
    return make_args(megatron_config_path=path, advantage_estimator="ppo", **overrides)


def test_flags_of_one_model(tmp_path):
    text = """
        actor: {lr: 2.0e-6, weight_decay: 0.2}
        critic: {lr: 1.0e-5, clip-grad: 0.5}
        ref: {load: REF, ckpt_step: 7}
    """.replace("REF", str(tmp_path))
    args = roles(tmp_path, text, lr=1e-6, weight_decay=0.1, kl_coef=0.1)
    assert (args.lr, args.critic_lr, args.weight_decay, args.clip_grad) == (2e-6, 1e-5, 0.2, 1.0)
    assert args.critic_overrides == {"clip_grad": 0.5, "weight_decay": 0.1, "lr": 1e-5}
    assert (args.ref_load, args.ref_ckpt_step) == (str(tmp_path), 7)
    args = roles(tmp_path, "actor: {lr: 2.0e-6}", lr=1e-6)
    assert (args.lr, args.critic_lr) == (2e-6, 1e-6)


def test_values_of_the_actor_alone_do_not_reach_the_critic(tmp_path):
    args = roles(tmp_path, "actor: {lr: 5.0e-6, weight_decay: 0.3}")
    assert (args.lr, args.weight_decay) == (5e-6, 0.3)
    assert args.critic_overrides == {"lr": 1e-6, "weight_decay": 0.01}  # the defaults


def test_a_repeated_run_reads_the_file_of_roles_again(tmp_path):
    args = roles(tmp_path, "actor: {weight_decay: 0.3}", weight_decay=0.1, run_dir=tmp_path / "run")
    (tmp_path / "run").mkdir()
    write_config(args, tmp_path / "run")
    again = parse_args(["--config", str(tmp_path / "run" / "config.yaml")])
    assert again.weight_decay == 0.3 and again.critic_overrides == {"weight_decay": 0.1}


def test_the_command_line_says_where_a_run_starts(tmp_path):
    text = "{actor: {load: /ckpt/sft}, critic: {load: /ckpt/critic}}"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    args = roles(tmp_path, text, load=tmp_path / "a", critic_load=tmp_path / "b")
    assert (args.load, args.critic_load) == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert sum("is used, not /ckpt/" in warning for warning in args.warnings) == 2


def test_the_critic_is_checked_with_its_own_values(tmp_path):
    """The actor's --min-lr is above the critic's learning rate, and the critic has a lower one of its own."""
    args = roles(tmp_path, "critic: {lr: 1.0e-6, min_lr: 0.0}", lr=1e-3, min_lr=1e-4)
    assert args.critic_overrides == {"lr": 1e-6, "min_lr": 0.0}
    args = roles(tmp_path, "critic: {optimizer: sgd, adam_beta2: 0.9}")
    assert any(
        "critic: --adam-beta2 has no effect with --optimizer sgd" in w for w in args.warnings
    )


def test_flags_of_one_model_as_a_list(tmp_path):
    rows = "[{role: critic, overrides: {lr: 1.0e-5, adam_beta2: 0.95}}]"
    args = roles(tmp_path, f"megatron: {rows}")
    assert args.critic_lr == 1e-5 and args.critic_overrides == {"adam_beta2": 0.95, "lr": 1e-5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("teacher: {lr: 1}", "there is no role 'teacher'"),
        ("critic: {no_such: 1}", "there is no flag --no-such"),
        ("critic: {lr: -1}", "lr must be at least 0"),
        ("critic: {lr: fast}", "is not a number"),
        ("critic: 3", "must hold 'flag: value' lines"),
        ("critic: {micro_batch_size: 7}", "--micro-batch-size of the actor"),
        ("critic: {min_lr: 1.0e-3}", "critic: --min-lr 0.001 is above --lr"),
        (
            "critic: {lr: 1.0e-5, min_lr: 1.0e-3}",
            "critic: --min-lr 0.001 is above --critic-lr 1e-05",
        ),
        ("critic: {lr_decay_style: WSD}", "critic: --lr-decay-style WSD is not honoured"),
        ("critic: {optimizer: dist_muon}", "critic: --optimizer dist_muon belongs to"),
        ("critic: {lr_warmup_iters: 2, lr_warmup_fraction: 0.5}", "mutually exclusive"),
        ("ref: {lr: 1.0e-6}", "load and ckpt_step only"),
        ("megatron: [{overrides: {}}]", "needs a 'role'"),
        ("megatron: [{role: [a]}]", "there is no role"),
    ],
)
def test_a_wrong_file_of_roles_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        roles(tmp_path, text)
    assert words in str(error.value) and "roles.yaml" in str(error.value)


def test_numbers_that_end_a_run(tmp_path):
    norms = tmp_path / "norms.json"
    saving = make_args(ci_test=True, ci_save_grad_norm=norms)
    good = {"train/log_prob_gap_mean": 0.01, "train/kl_loss": 1e-5, "train/grad_norm": 2.0}
    for rollout_id in (0, 1):
        check_numbers(saving, rollout_id, good)
    comparing = make_args(ci_test=True, ci_load_grad_norm=norms)
    check_numbers(comparing, 1, {**good, "train/grad_norm": 2.05})
    lenient = make_args(ci_test=True, ci_disable_kl_checker=True)
    check_numbers(lenient, 0, {**good, "train/kl_loss": 0.5})
    check_numbers(saving, 2, {**good, "train/kl_loss": 0.5})  # training has moved the actor
    check_numbers(make_args(ci_test=True), 0, {"train/loss": 1.0})  # supervised
    for args, change in (
        (comparing, {"train/grad_norm": 2.2}),
        (lenient, {"train/log_prob_gap_mean": 0.11}),
        (lenient, {"train/log_prob_gap_mean": float("nan")}),
        (comparing, {"train/kl_loss": -0.01}),
    ):
        (name,) = change
        with pytest.raises(UserError, match=f"--ci-test, rollout 0: {name}"):
            check_numbers(args, 0, {**good, **change})


def test_weights_of_every_update_are_kept(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    for keep, left in (
        (False, ["weights_0000002"]),
        (True, ["weights_0000001", "weights_0000002"]),
    ):
        folder = tmp_path / str(keep)
        transport = DiskTransport(folder, source, keep_files=keep)
        for version in (1, 2):
            transport.open([], version)
            transport.finish()
        assert sorted(path.name for path in folder.iterdir()) == left


def test_evaluation_has_limits_and_keys_of_its_own(tmp_path):
    data = tmp_path / "aime.jsonl"
    data.write_text('{"input": "1"}\n')
    flags = {"max_prompt_len": 5, "min_new_tokens": 2, "max_context_len": 9, "tool_key": "t"}
    given = {f"eval_{name}": value for name, value in flags.items()}
    (dataset,) = make_args(eval_interval=1, eval_prompt_data=[data], **given).eval_datasets
    assert {name: getattr(dataset, name) for name in flags} == flags


def test_a_checkpoint_of_a_folder_by_its_number(tmp_path):
    folder = CheckpointFolder(str(tmp_path))
    for rollout_id in (3, 5):
        folder.begin(rollout_id)
        folder.commit(CheckpointMeta(rollout_id=rollout_id, weight_version=1, train_backend="fsdp"))
    distilled = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": tmp_path}
    args = make_args(ref_load=tmp_path, ref_ckpt_step=3, **distilled, opd_teacher_ckpt_step=5)
    assert first_weights(args, "actor") == first_weights(args, "ref") == str(folder.path(3))
    assert teacher_weights(args) == str(folder.path(5))
    with pytest.raises(ConfigError, match=r"--ref-ckpt-step 4: .* has no complete checkpoint"):
        first_weights(make_args(ref_load=tmp_path, ref_ckpt_step=4), "ref")


def test_packed_micro_batches_are_padded_to_the_multiple():
    pytest.importorskip("megatron.core")
    from slime.backends.megatron_utils.passes import Passes

    config = SimpleNamespace(
        virtual_pipeline_model_parallel_size=None, num_moe_experts=None, sequence_parallel=True,
        fp8=None, multi_latent_attention=False, apply_rope_fusion=False, rotary_interleaved=False, transformer_impl="local",
    )  # fmt: skip
    parallel = ParallelInfo(tp_size=2)
    for multiple, padded in ((None, 6), (8, 16), (3, 6)):
        passes = Passes(config, parallel, padded=False, multiple=multiple)
        assert passes._round_up(5) == padded
