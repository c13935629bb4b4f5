"""The command-line surface: every flag that scripts rely on, with its default; and the tables."""

import dataclasses
import re
from pathlib import Path

import pytest

from slime.config.arguments import Args, parse_args
from slime.config.flags.engine_options import HARMLESS, HONOURED
from slime.config.flags.parser import read_command_line
from slime.config.flags.registry import (
    OwnFlags,
    all_flags,
    options,
    own_flags,
    read_table,
    table_flags,
)
from slime.core.errors import ConfigError
from tools import write_arguments_docs as docs

ROOT = Path(__file__).parents[2]


def words(text: str) -> list[str]:
    return text.split()


# Names without defaults are switches that are off, or values that are unset or derived.
OWN = words("""
train-backend=megatron debug-rollout-only debug-train-only load-debug-rollout-data
rollout-engine=auto config dry-run watch log-samples=8 train-async run-dir actor-num-nodes=1 actor-num-gpus-per-node=8
rollout-num-gpus rollout-num-gpus-per-engine=1 num-gpus-per-node=8 colocate offload offload-train
offload-rollout distributed-backend=nccl distributed-timeout-minutes=10 train-env-vars={}
update-weight-buffer-size=536870912 update-weights-interval=1 update-weight-transport
update-weight-disk-dir check-weight-update-equal=True hf-checkpoint model-name
custom-model-provider-path enable-mtp-training log-probs-chunk-size=1024 recompute-loss-function
only-train-params-name-list freeze-params-name-list qkv-format=thd custom-megatron-init-path
custom-megatron-before-log-prob-hook-path custom-megatron-before-train-step-hook-path
fsdp-cpu-offload gradient-checkpointing attn-implementation bf16 fp32
lora-rank lora-alpha=8.0 lora-dropout=0.0 lora-target-modules=['all-linear'] lora-use-rslora lora-experts-shared-outer
lora-adapter-path lora-merge-for-rollout
rollout-function-path=slime.rollout.sglang_rollout.generate_rollout rollout-temperature=1.0
rollout-top-p=1.0 rollout-top-k=-1 rollout-max-context-len rollout-max-prompt-len
rollout-max-response-len rollout-stop rollout-stop-token-ids rollout-skip-special-tokens
rollout-shuffle rollout-seed=42 over-sampling-batch-size dynamic-sampling-filter-path
partial-rollout mask-offpolicy-in-partial-rollout custom-generate-function-path buffer-filter-path
rollout-sample-filter-path rollout-all-samples-process-path rollout-data-postprocess-path
sglang-server-concurrency=512 rollout-external rollout-external-engine-addrs max-weight-staleness
sglang-config prefill-num-servers sglang-router-ip sglang-router-port
num-rollout num-epoch data-source-path=slime.rollout.data_source.RolloutDataSourceWithBuffer
prompt-data apply-chat-template apply-chat-template-kwargs={} input-key=input label-key
metadata-key=metadata tool-key=tools multimodal-keys={} limit-mm-data-per-request={} allowed-local-media-path
freeze-vision-tower=True reward-num-threads=32 start-rollout-id rollout-batch-size n-samples-per-prompt=1
global-batch-size num-steps-per-rollout micro-batch-size=1 balance-data use-dynamic-batch-size
max-tokens-per-gpu log-probs-max-tokens-per-gpu eval-interval eval-prompt-data eval-config
skip-eval-before-train eval-function-path n-samples-per-eval-prompt=1 eval-temperature eval-top-p
eval-top-k eval-max-response-len eval-input-key eval-label-key advantage-estimator=grpo
eps-clip=0.2 eps-clip-high eps-clip-c value-clip=0.2 kl-coef=0.0 use-kl-loss kl-loss-coef=0.0
kl-loss-type=k1 use-unbiased-kl entropy-coef=0.0 gamma=1.0 lambd=1.0 normalize-advantages
disable-grpo-std-normalization disable-rewards-normalization calculate-per-token-loss
loss-type=policy_loss custom-loss-function-path custom-advantage-function-path
custom-config-path disable-compute-advantages-and-returns data-pad-size-multiplier megatron-config-path
ref-micro-batch-size ref-ckpt-step no-load-optim keep-old-actor opd-teacher-ckpt-step
rollout-buffer-url rollout-data-transport eval-max-context-len eval-max-prompt-len
eval-min-new-tokens eval-tool-key update-weight-mode=full update-weight-delta-encoding update-weight-delta-checksum
update-weight-local-checkpoint-dir update-weight-disk-keep-files
disable-wandb-random-suffix dump-details ci-test ci-train-rollout-logprob-abs-diff-threshold=0.1
ci-disable-kl-checker ci-save-grad-norm ci-load-grad-norm use-tis tis-clip=2.0
tis-clip-low=0.0 custom-tis-function-path tis-level=token tis-mode=truncate overlong-buffer-len
overlong-penalty-factor=1.0 custom-pg-loss-reducer-function-path use-rollout-logprobs
get-mismatch-metrics num-critic-only-steps=0 critic-load critic-save critic-lr ref-update-interval
use-routing-replay use-rollout-routing-replay use-opd opd-type opd-kl-coef=1.0 opd-teacher-load
ref-load load ckpt-step save save-interval save-total-limit async-save no-save-optim save-hf
seed=1234 clip-grad=1.0 lr=1e-06 optimizer=adam min-lr=0.0 lr-decay-style=linear lr-warmup-iters=0
lr-warmup-fraction lr-decay-iters weight-decay=0.01 adam-beta1=0.9 adam-beta2=0.999 adam-eps=1e-08
sgd-momentum=0.9 muon-momentum=0.95 muon-use-nesterov muon-num-ns-steps=5 muon-scale-mode=spectral
muon-extra-scale-factor=1.0
rm-type reward-key eval-reward-key group-rm rm-url allow-row-rm-types=[] rm-grading=lenient rollout-sample-hook-path allow-unsandboxed-code custom-rm-path custom-reward-post-process-path
custom-convert-samples-to-train-data-path use-fault-tolerance=True
phase-timeout-minutes={} rollout-health-check-interval=30.0 rollout-health-check-timeout=30.0
rollout-health-check-first-wait=0.0 rollout-no-engine-timeout=1800.0 use-wandb wandb-mode wandb-dir wandb-key wandb-host wandb-team
wandb-group wandb-project wandb-run-id use-tensorboard tb-project-name tb-experiment-name
log-passrate save-debug-rollout-data save-debug-train-data profile-target
custom-rollout-log-function-path custom-eval-rollout-log-function-path loss-mask-type=qwen
""")

CHOICES = {
    "train_backend": "megatron fsdp",
    "rollout_engine": "auto sglang slime",
    "update_weight_transport": "tensor distributed disk",
    "advantage_estimator": (
        "grpo gspo cispo reinforce_plus_plus reinforce_plus_plus_baseline ppo rloo"
    ),
    "kl_loss_type": "k1 k2 k3 low_var_kl",
    "loss_type": "policy_loss sft_loss custom_loss",
    "tis_level": "token sequence geometric",
    "tis_mode": "truncate mask",
    "opd_type": "sglang megatron",
    "loss_mask_type": "qwen qwen3 distill_qwen",
    "qkv_format": "thd bshd",
}

MEGATRON = words("""
--swiglu --disable-bias-linear --add-qkv-bias --qk-layernorm --group-query-attention
--num-query-groups --kv-channels --normalization --norm-epsilon --use-rotary-position-embeddings
--position-embedding-type --rotary-base --rotary-percent --rotary-interleaved --use-rope-scaling
--rotary-scaling-factor --no-rope-fusion --untie-embeddings-and-output-weights --vocab-size
--make-vocab-size-divisible-by --max-position-embeddings --seq-length --post-self-attn-layernorm
--post-mlp-layernorm --num-experts --moe-layer-freq --moe-ffn-hidden-size
--moe-shared-expert-intermediate-size --moe-router-topk --moe-router-score-function
--moe-router-pre-softmax --moe-router-enable-expert-bias --moe-router-bias-update-rate
--moe-router-load-balancing-type --moe-router-topk-scaling-factor --moe-router-num-groups
--moe-router-group-topk --moe-router-dtype --moe-grouped-gemm --moe-permute-fusion
--moe-token-drop-policy --moe-aux-loss-coeff --moe-token-dispatcher-type --moe-enable-deepep
--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim
--v-head-dim --mscale --mscale-all-dim --mtp-num-layers --attention-backend
--attention-softmax-in-fp32 --attention-dropout --hidden-dropout
--accumulate-allreduce-grads-in-fp32 --overlap-grad-reduce --overlap-param-gather --optimizer --lr
--min-lr --lr-decay-style --lr-warmup-iters --lr-warmup-fraction --lr-decay-iters --weight-decay
--adam-beta1 --adam-beta2 --adam-eps --clip-grad --transformer-impl --ckpt-format
--use-distributed-optimizer --tensor-model-parallel-size --sequence-parallel
--pipeline-model-parallel-size --context-parallel-size --expert-model-parallel-size
--expert-tensor-parallel-size --recompute-granularity --recompute-method --recompute-num-layers
--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
--num-layers-per-virtual-pipeline-stage --num-layers --hidden-size --ffn-hidden-size
--num-attention-heads
""")

SGLANG = words("""
mem-fraction-static enable-dp-attention dp-size ep-size moe-dense-tp-size enable-dp-lm-head
cuda-graph-bs moe-a2a-backend deepep-mode speculative-algorithm speculative-num-draft-tokens
tp-size enable-torch-compile enable-deterministic-inference context-length max-running-requests
max-total-tokens chunked-prefill-size page-size dtype random-seed disable-radix-cache
skip-server-warmup log-level cuda-graph-bs-decode cuda-graph-bs-prefill
enable-return-routed-experts enable-memory-saver api-key
""")


def test_slimes_own_flags_are_exactly_these_with_these_defaults():
    expected = dict(entry.split("=") if "=" in entry else (entry, "") for entry in OWN)
    assert len(expected) == len(OWN)
    shown = {
        flag.option.removeprefix("--"): (
            "" if flag.default is None or flag.default is False else str(flag.default)
        )
        for flag in own_flags().values()
    }
    assert shown == expected


def test_arguments_have_the_fields_of_every_group():
    assert set(OwnFlags.__bases__) <= set(Args.__mro__)


@pytest.mark.parametrize(("name", "choices"), CHOICES.items())
def test_choices(name, choices):
    assert own_flags()[name].choices == tuple(choices.split())


def test_every_own_flag_is_described():
    for flag in own_flags().values():
        assert flag.help and flag.group and not flag.help.endswith("."), flag.name


# What these say is used up when the arguments are resolved.
USED_WHILE_RESOLVING = words("""
offload num_gpus_per_node distributed_backend optimizer qkv_format num_steps_per_rollout eval_prompt_data
eval_config n_samples_per_eval_prompt eval_temperature eval_top_p eval_top_k eval_max_response_len
eval_input_key eval_label_key prefill_num_servers
eval_max_context_len eval_max_prompt_len eval_min_new_tokens eval_tool_key
megatron_config_path dump_details custom_config_path critic_lr
lora_alpha lora_dropout lora_target_modules lora_use_rslora lora_merge_for_rollout
lora_experts_shared_outer
""")
FOR_HOOKS = words("rollout_buffer_url")


def test_no_flag_is_ignored():
    """Each is read somewhere, used while resolving, or refused as not available."""
    files = [p for p in (ROOT / "slime").rglob("*.py") if "config" not in p.parts]
    text = "\n".join(path.read_text() for path in [*files, ROOT / "train.py"])
    read = set(re.findall(r"args\.(\w+)", text)) | set(re.findall(r"[\"'](\w+)[\"']", text))
    elsewhere = {*USED_WHILE_RESOLVING, *FOR_HOOKS, "config"}
    elsewhere |= {flag.name for flag in own_flags().values() if flag.ignored}  # a warning says why
    ignored = [
        flag.name
        for flag in own_flags().values()
        if flag.name not in read | elsewhere and flag.backend != "megatron"
    ]
    assert ignored == []


def test_megatrons_spellings_are_registered():
    missing = [option for option in MEGATRON if option not in options()]
    assert missing == []


def test_sglangs_options_are_registered():
    missing = [name for name in SGLANG if f"--sglang-{name}" not in options()]
    assert missing == []
    assert "--router-policy" in options() and "--router-cache-threshold" in options()


def test_spellings_set_what_they_mean_in_megatron():
    assert read_command_line(["--disable-bias-linear", "--no-rope-fusion", "--swiglu"]) == {
        "add_bias_linear": False,
        "apply_rope_fusion": False,
        "swiglu": True,
    }
    assert read_command_line(["--norm-epsilon", "1e-6"]) == {"norm_epsilon": 1e-6}
    assert read_command_line(["--layernorm-epsilon", "1e-6"]) == {"norm_epsilon": 1e-6}
    assert read_command_line(["--num-experts", "8"]) == {"num_experts": 8}
    assert read_command_line(["--accumulate-allreduce-grads-in-fp32"]) == {
        "accumulate_allreduce_grads_in_fp32": True
    }
    assert read_command_line(["--moe-layer-freq", "[0]*3+[1]*89"]) == {
        "moe_layer_freq": "[0]*3+[1]*89"
    }
    flags = {flag.name: flag for flag in all_flags().values() if flag.family == "megatron"}
    assert flags["num_experts"].sets == ("TransformerConfig.num_moe_experts",)
    assert flags["norm_epsilon"].sets == ("TransformerConfig.layernorm_epsilon",)
    assert flags["use_distributed_optimizer"].default is True
    assert set(flags["use_distributed_optimizer"].sets) == {
        "OptimizerConfig.use_distributed_optimizer",
        "DistributedDataParallelConfig.use_distributed_optimizer",
    }


def test_sglang_values():
    argv = words(
        "--sglang-cuda-graph-bs 1 2 4 8 --sglang-moe-a2a-backend deepep --sglang-dp-size 32"
    )
    assert read_command_line(argv) == {
        "sglang_cuda_graph_bs": [1, 2, 4, 8],
        "sglang_moe_a2a_backend": "deepep",
        "sglang_dp_size": 32,
    }
    with pytest.raises(ConfigError, match="did you mean deepep"):
        read_command_line(["--sglang-moe-a2a-backend", "deepp"])
    assert read_command_line(["--sglang-tensor-parallel-size", "2"]) == {"sglang_tp_size": 2}


GLM_355B = """
--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
--context-parallel-size 2 --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--use-dynamic-batch-size --max-tokens-per-gpu 16384
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
--entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
--adam-beta2 0.98 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
--use-precision-aware-optimizer
--rollout-num-gpus-per-engine 32 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention
--sglang-dp-size 32 --sglang-ep-size 32 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
--sglang-cuda-graph-bs 1 2 4 8 16 24 32 --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
--attention-softmax-in-fp32 --attention-backend flash --moe-enable-deepep
--moe-token-dispatcher-type flex
--prompt-data dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template
--rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32
--n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-temperature 1
--global-batch-size 256 --balance-data
--eval-interval 20 --eval-prompt-data aime aime-2024.jsonl --n-samples-per-eval-prompt 16
--eval-max-response-len 16384 --eval-top-p 1
--hf-checkpoint GLM-4.5-FP8/ --ref-load GLM-4.5_torch_dist/ --load GLM-4.5_slime/
--save GLM-4.5_slime/ --save-interval 20
--actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate --rollout-engine sglang
"""


def test_a_large_published_command_line_is_understood():
    """What this machine lacks for it (files, DeepEP) is warned of; nothing else is wrong with it."""
    args = parse_args(words(GLM_355B), offline=True)
    assert args.train_backend == "megatron"
    assert any("deep_ep" in warning for warning in args.warnings)


def test_no_two_flags_share_an_option():
    taken = [o for flag in all_flags().values() for o in (*flag.options, *flag.off_options)]
    assert len(taken) == len(set(taken))


def test_every_switch_can_be_turned_off():
    for flag in all_flags().values():
        assert bool(flag.off_options) == (flag.kind == "bool"), flag.name


def test_the_embedded_engine_speaks_of_options_that_exist():
    names = {flag.name.removeprefix("sglang_") for flag in table_flags("sglang", "SGLang")}
    assert {*HONOURED, *HARMLESS} <= names


def test_the_page_of_arguments_is_up_to_date():
    assert docs.PATH.read_text() == docs.arguments_page(), f"run `{docs.COMMAND}`"


def test_the_megatron_table_fits_the_installed_package():
    core = pytest.importorskip("megatron.core")
    table = read_table("megatron")
    if core.__version__ not in table["versions"]:
        pytest.skip(f"megatron-core {core.__version__} is installed")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    configs = (
        TransformerConfig,
        MLATransformerConfig,
        OptimizerConfig,
        DistributedDataParallelConfig,
    )
    known = {target for row in table["flags"] for target in row["sets"]}
    fields = {f"{c.__name__}.{f.name}": f for c in configs for f in dataclasses.fields(c)}
    assert known <= set(fields)
    plain = (bool, int, float, str)
    settable = {
        name
        for name, field in fields.items()
        if field.type in plain and not name.startswith("MLATransformerConfig")
    }
    assert settable <= known
    for row in table["flags"]:
        default = fields[row["sets"][0]].default
        if isinstance(default, plain):
            assert row.get("default") == default, row["name"]


def test_the_sglang_table_fits_the_installed_package():
    sglang = pytest.importorskip("sglang")
    table = read_table("sglang")
    if sglang.__version__ not in table["versions"]:
        pytest.skip(f"sglang {sglang.__version__} is installed")
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        for option in action.option_strings:
            if option in ("-h", "--help", "--config"):
                continue
            flag = options()[option.replace("--", "--sglang-", 1)]
            assert (action.nargs == 0) == (flag.kind == "bool"), option
            assert (action.nargs in ("+", "*")) == flag.many, option
            if flag.choices:
                assert set(action.choices or ()) <= set(flag.choices), option


def test_the_router_table_fits_the_installed_package():
    router_args = pytest.importorskip("sglang_router.router_args")
    import argparse

    parser = argparse.ArgumentParser()
    router_args.RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    spelled = {
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--router-")
    }
    assert spelled <= set(options())
