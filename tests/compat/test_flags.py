"""Flags of scripts written for other versions of slime: honoured, or accepted with a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.config.derive import portable
from slime.core.errors import ConfigError
from tests.args import make_args

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
    from slime.config.arguments import parse_args
    from tests.args import make_argv

    argv = make_argv(**glm4_run(tmp_path))
    switches = ["--no-check-for-nan-in-loss-and-grad", "--grad-reduce-in-bf16"]
    args = parse_args([*argv, *switches, "--no-position-embedding"])
    assert args.check_for_nan_in_grad is False
    assert args.accumulate_allreduce_grads_in_fp32 is False
    with pytest.raises(ConfigError, match="--add-position-embedding is not honoured"):
        parse_args([*argv, "--add-position-embedding"])
