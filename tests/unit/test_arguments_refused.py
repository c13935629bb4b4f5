"""Every combination that is refused, and words of the sentence that refuses it."""

import json

import pytest

from slime.config.arguments import parse_args
from slime.core.errors import ConfigError
from tests.args import make_args, make_argv

MODEL = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_experts": 8,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def refusal(**overrides: object) -> str:
    with pytest.raises(ConfigError) as error:
        make_args(**overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


RULES = [
    ({"rollout_temperature": 0}, ["--rollout-temperature", "above 0"]),
    ({"rollout_temperature": -0.5}, ["--rollout-temperature", "above 0"]),
    ({"rollout_top_p": 0}, ["--rollout-top-p"]),
    ({"rollout_top_k": 0}, ["--rollout-top-k"]),
    ({"eval_temperature": -1}, ["--eval-temperature", "at least 0"]),
    (
        {"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True},
        ["--kl-coef", "--kl-loss-coef", "set one"],
    ),
    (
        {"nccl_ub": True, "colocate": True, "train_backend": "megatron"},
        ["--nccl-ub", "--offload-train", "--no-offload-train"],
    ),
    ({"over_sampling_batch_size": 1}, ["--over-sampling-batch-size", "--rollout-batch-size"]),
    ({"num_rollout": None}, ["--num-rollout", "--num-epoch"]),
    ({"num_rollout": 0}, ["--num-rollout", "at least 1"]),
    ({"global_batch_size": 3}, ["--global-batch-size 3", "4"]),
    ({"num_steps_per_rollout": 3}, ["--num-steps-per-rollout 3", "4"]),
    ({"global_batch_size": 2, "num_steps_per_rollout": 4}, ["--global-batch-size", "8"]),
    ({"rollout_batch_size": None}, ["--rollout-batch-size", "missing"]),
    ({"hf_checkpoint": None}, ["--hf-checkpoint", "missing"]),
    ({"prompt_data": None}, ["--prompt-data", "missing"]),
    ({"prompt_data": ["/no/data.jsonl@[0:3]"]}, ["--prompt-data", "/no/data.jsonl does not exist"]),
    ({"hf_checkpoint": "/no/model"}, ["--hf-checkpoint", "/no/model"]),
    ({"hf_checkpoint": "Qwen/Qwen3-0.6B"}, ["hf download Qwen/Qwen3-0.6B"]),
    ({"hf_checkpoint": "/tmp"}, ["/tmp", "config.json"]),
    ({"ref_load": "/no/ref"}, ["--ref-load", "/no/ref"]),
    ({"eval_prompt_data": ["a", "/no/eval.jsonl"]}, ["--eval-prompt-data a", "/no/eval.jsonl"]),
    ({"eval_prompt_data": ["a", __file__, "b"]}, ["--eval-prompt-data", "NAME PATH"]),
    ({"eval_prompt_data": ["a", __file__, "a", __file__]}, ["two datasets", "a"]),
    ({"eval_config": "/no/eval.yaml"}, ["--eval-config", "/no/eval.yaml"]),
    ({"eval_interval": 2}, ["--eval-interval", "--eval-prompt-data"]),
    ({"config": "/no/run.yaml"}, ["--config", "/no/run.yaml"]),
    ({"load_debug_rollout_data": "/no/{rollout_id}.pt"}, ["--load-debug-rollout-data", "/no"]),
    ({"debug_train_only": True}, ["--load-debug-rollout-data"]),
    ({"debug_train_only": True, "debug_rollout_only": True}, ["remove one"]),
    ({"rollout_max_context_len": 8, "rollout_max_prompt_len": 8}, ["no response token"]),
    ({"rollout_max_context_len": 1}, ["--rollout-max-context-len 1", "no response token"]),
    ({"rollout_max_prompt_len": 1024}, ["1024", "no response token"]),
    ({"rollout_max_response_len": 1024}, ["no room for a prompt", "1024"]),
    ({"save_hf": "hf_{step}"}, ["--save-hf hf_{step}", "{rollout_id}"]),
    ({"save_debug_rollout_data": "data_{"}, ["--save-debug-rollout-data", "{rollout_id}"]),
    ({"save_debug_train_data": "{0}.pt"}, ["--save-debug-train-data", "{rank}"]),
    ({"sglang_context_length": 4, "rollout_max_prompt_len": 4}, ["--sglang-context-length"]),
    ({"bf16": True, "fp32": True}, ["--bf16", "--fp32"]),
    ({"rollout_num_gpus": 0}, ["--rollout-num-gpus 0"]),
    ({"rollout_num_gpus_per_engine": 2, "rollout_num_gpus": 2}, ["embedded", "use 1"]),
    (
        {"sglang_tp_size": 2, "rollout_num_gpus_per_engine": 1},
        ["--sglang-tp-size 2", "--rollout-num-gpus-per-engine 1"],
    ),
    ({"actor_num_gpus_per_node": 4, "num_gpus_per_node": 2}, ["--num-gpus-per-node 2"]),
    ({"distributed_backend": "nccl"}, ["nccl", "gloo"]),
    ({"sglang_speculative_algorithm": "EAGLE"}, ["--sglang-speculative-algorithm", "embedded"]),
    (
        {"sglang_enable_lora_overlap_loading": True},
        ["--sglang-enable-lora-overlap-loading", "embedded"],
    ),
    ({"router_policy": "random"}, ["--router-policy", "router"]),
    ({"rm_type": "maths"}, ["--rm-type", "did you mean math?"]),
    ({"rm_type": "remote_rm"}, ["--rm-url"]),
    ({"loss_type": "custom_loss"}, ["--custom-loss-function-path"]),
    ({"custom_loss_function_path": "a.b"}, ["--loss-type custom_loss"]),
    ({"eps_clip_c": 0.5}, ["--eps-clip-c", "above 1"]),
    ({"use_tis": True, "tis_clip": 1, "tis_clip_low": 2}, ["--tis-clip-low"]),
    ({"min_lr": 1}, ["--min-lr", "--lr"]),
    ({"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1}, ["--lr-warmup-iters", "remove one"]),
    ({"lr_warmup_iters": 9}, ["--lr-warmup-iters 9", "2 steps"]),
    ({"lr_decay_style": "WSD"}, ["WSD", "cosine"]),
    ({"optimizer": "dist_muon"}, ["--optimizer dist_muon", "use muon"]),
    ({"optimizer": "muon", "fsdp_cpu_offload": True}, ["--optimizer muon", "--fsdp-cpu-offload"]),
    (
        {"optimizer": "muon", "train_backend": "megatron", "use_distributed_optimizer": True},
        ["--use-distributed-optimizer is for --optimizer adam"],
    ),
    (
        {"optimizer": "sgd", "train_backend": "megatron", "optimizer_cpu_offload": True},
        ["--optimizer-cpu-offload is for --optimizer adam"],
    ),
    (
        {"optimizer": "muon", "train_backend": "megatron", "muon_num_ns_steps": 3},
        ["--muon-num-ns-steps 3", "5 or 10"],
    ),
    ({"save_interval": 1}, ["--save"]),
    ({"ckpt_step": 1}, ["--load"]),
    ({"ckpt_step": 0}, ["--ckpt-step needs --load"]),
    ({"critic_save": "x", "advantage_estimator": "ppo"}, ["--critic-save needs --save"]),
    ({"overlong_buffer_len": 9}, ["--overlong-buffer-len 9", "8"]),
    ({"train_env_vars": {"A": 1}}, ["--train-env-vars", "A"]),
    ({"num_epoch": 1, "data_source_path": "a.B"}, ["--num-rollout"]),
    ({"num_epoch": 1}, ["1 prompts", "--rollout-batch-size 2"]),  # the test data has one prompt
    ({"update_weight_transport": "tensor", "actor_num_nodes": 2}, ["--colocate"]),
    # flags of the other trainer
    ({"tensor_model_parallel_size": 2}, ["--tensor-model-parallel-size", "megatron"]),
    ({"swiglu": True}, ["--swiglu", "megatron"]),
    ({"recompute_granularity": "full"}, ["--gradient-checkpointing"]),
    ({"custom_model_provider_path": "a.b"}, ["--custom-model-provider-path", "megatron"]),
    ({"train_backend": None, "fsdp_cpu_offload": True}, ["--fsdp-cpu-offload", "fsdp"]),
    ({"train_backend": None, "gradient_checkpointing": True}, ["--train-backend fsdp"]),
]


@pytest.mark.parametrize(("overrides", "words"), RULES, ids=lambda value: None)
def test_refused(overrides, words):
    message = refusal(**overrides)
    assert all(word in message for word in words), message


def test_what_a_rule_allows():
    """The nearest valid neighbours of the rules above."""
    make_args(rollout_temperature=1e-3, eval_temperature=0)
    make_args(kl_loss_coef=0.0)
    make_args(use_dynamic_batch_size=True, max_tokens_per_gpu=9)
    make_args(over_sampling_batch_size=2)
    make_args(global_batch_size=2, num_steps_per_rollout=2)
    make_args(rollout_max_context_len=9, rollout_max_prompt_len=8)
    make_args(rollout_max_prompt_len=1023)
    make_args(rollout_max_response_len=1023)
    make_args(rollout_max_response_len=1024, rollout_max_context_len=1024)
    make_args(save_hf="hf_{rollout_id}", save_debug_train_data="{rollout_id:03d}_{rank}_{{a}}")
    make_args(rollout_num_gpus=3)
    make_args(sglang_tp_size=1, sglang_enable_lora=False)
    make_args(lr_warmup_iters=2)
    make_args(lr_warmup_iters=9, lr_decay_style="constant")
    make_args(rm_type="boxed_f1")
    make_args(overlong_buffer_len=8)
    make_args(tensor_model_parallel_size=None, qkv_format="thd")


def megatron_flags(**overrides: object) -> dict[str, object]:
    return {
        "train_backend": "megatron",
        "actor_num_gpus_per_node": 8,
        "rollout_num_gpus": 1,
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "ffn_hidden_size": 128,
        "num_experts": 8,
        **overrides,
    }


def megatron(**overrides: object) -> str:
    """The refusal of a Megatron run."""
    return refusal(**megatron_flags(**overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
        },
        {"expert_model_parallel_size": 8, "context_parallel_size": 8},
        {"norm_epsilon": 1e-5, "rotary_base": 10000, "vocab_size": 99, "num_query_groups": 2},
        {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True},
        {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1},
        dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")),
    ],
)
def test_megatron_flags_that_fit(model, overrides):
    args = make_args(**megatron_flags(hf_checkpoint=model, **overrides))
    assert args.train_backend == "megatron"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_layers": 4}, ["--num-layers 4", "num_hidden_layers 8"]),
        ({"hidden_size": 32}, ["--hidden-size 32", "hidden_size 64"]),
        ({"num_attention_heads": 4}, ["--num-attention-heads 4", "8"]),
        ({"num_query_groups": 8}, ["--num-query-groups 8", "num_key_value_heads 2"]),
        ({"ffn_hidden_size": 256}, ["--ffn-hidden-size 256", "intermediate_size 128"]),
        ({"num_experts": 4}, ["--num-experts 4", "num_experts 8"]),
        ({"norm_epsilon": 1e-6}, ["--norm-epsilon 1e-06", "rms_norm_eps 1e-05"]),
        ({"rotary_base": 1e6}, ["--rotary-base 1e+06", "rope_theta 10000"]),
        ({"vocab_size": 100}, ["--vocab-size 100", "99"]),
        ({"untie_embeddings_and_output_weights": True}, ["tie_word_embeddings", "remove"]),
        ({"tensor_model_parallel_size": 3}, ["--tensor-model-parallel-size 3", "8 training GPUs"]),
        (
            {"tensor_model_parallel_size": 4, "context_parallel_size": 4},
            ["16", "does not divide the 8 training GPUs"],
        ),
        ({"expert_model_parallel_size": 16}, ["--expert-model-parallel-size 16"]),
        (
            {"pipeline_model_parallel_size": 8, "tensor_model_parallel_size": 8},
            ["64", "8 training"],
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3},
            ["--num-layers-per-virtual-pipeline-stage 3", "6 does not divide the 8 layers"],
        ),
        ({"tensor_model_parallel_size": 2}, ["with experts needs --sequence-parallel"]),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            ["--expert-tensor-parallel-size 1", "--expert-model-parallel-size 2 or more"],
        ),
        ({"moe_enable_deepep": True}, ["deep_ep", "alltoall"]),
        (
            {
                "context_parallel_size": 2,
                "loss_type": "custom_loss",
                "custom_loss_function_path": "a.b",
            },
            ["--custom-loss-function-path", "--context-parallel-size 2"],
        ),
        (
            {"use_precision_aware_optimizer": True},
            ["--optimizer-cpu-offload", "TransformerEngine"],
        ),
        (
            {
                "use_precision_aware_optimizer": True,
                "optimizer_cpu_offload": True,
                "use_distributed_optimizer": False,
            },
            ["distributed optimizer"],
        ),
    ],
)
def test_megatron_flags_that_do_not_fit(model, overrides, words):
    message = megatron(hf_checkpoint=model, **overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("mamba", ["mamba", "qwen3_moe", "--train-backend fsdp"]),
    ],
)
def test_models_megatron_does_not_train(tmp_path, model_type, words):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "model_type": model_type}))
    message = megatron(hf_checkpoint=tmp_path)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
        ("qwen3", {"rope_scaling": {"type": "longrope", "factor": 2.0}}),
        ("deepseek_v3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_rope_scaling_megatron_does_not_train(tmp_path, model_type, rope):
    config = {**MODEL, "model_type": model_type, **rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (fields,) = rope.values()
    kind = fields.get("rope_type") or fields["type"]
    message = megatron(hf_checkpoint=tmp_path)
    assert f"rope_type {kind}" in message and "--train-backend fsdp" in message


def test_a_tied_model_cannot_be_untied(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "tie_word_embeddings": True}))
    message = megatron(hf_checkpoint=tmp_path, untie_embeddings_and_output_weights=True)
    assert "remove --untie-embeddings-and-output-weights" in message


def test_heads_and_experts_that_the_parallel_sizes_do_not_divide(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**MODEL, "num_attention_heads": 6, "num_experts": 6})
    )
    fits = {"num_attention_heads": 6, "num_experts": 6, "hf_checkpoint": tmp_path}
    message = megatron(**fits, tensor_model_parallel_size=4)
    assert "--tensor-model-parallel-size 4 does not divide --num-attention-heads 6" in message
    message = megatron(**fits, expert_model_parallel_size=4)
    assert "--expert-model-parallel-size 4 does not divide --num-experts 6" in message


def test_layers_and_key_heads_that_the_parallel_sizes_do_not_divide(tmp_path):
    odd = {"num_hidden_layers": 6, "num_key_value_heads": 3, "num_attention_heads": 12}
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **odd}))
    fits = {"num_layers": None, "num_attention_heads": None, "hf_checkpoint": tmp_path}
    message = megatron(**fits, pipeline_model_parallel_size=4)
    assert "--pipeline-model-parallel-size 4 does not divide the 6 layers" in message
    message = megatron(**fits, tensor_model_parallel_size=4)
    assert "the 3 key heads" in message


def test_experts_spread_where_there_are_none(tmp_path):
    dense = {k: v for k, v in MODEL.items() if "experts" not in k}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    message = megatron(hf_checkpoint=tmp_path, num_experts=None, expert_model_parallel_size=2)
    assert "has no experts" in message


def test_a_dry_run_warns_about_what_this_machine_lacks(tmp_path):
    overrides = {
        "hf_checkpoint": "/no/model",
        "prompt_data": ["/no/data.parquet"],
        "eval_prompt_data": ["a", "/no/eval.jsonl"],
        "eval_interval": 1,
    }
    args = make_args(dry_run=True, **overrides)
    for path in ("/no/model", "/no/data.parquet", "/no/eval.jsonl"):
        assert any(path in warning for warning in args.warnings)
    assert parse_args(make_argv(**overrides), offline=True).warnings == args.warnings
    with pytest.raises(ConfigError):
        make_args(**overrides)


def test_flags_without_effect_are_warned_about():
    args = make_args(wandb_project="a", tis_clip=3.0)
    assert [w.split()[0] for w in args.warnings] == ["--wandb-project", "--tis-clip"]
    assert make_args().warnings == ()
