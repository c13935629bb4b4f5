"""What to type instead of options and values that other versions have and this one does not.

The text completes "there is no flag NAME: ..." and takes precedence over similar names. An option that can be
honoured belongs among the flags, not here.
"""

from __future__ import annotations

_LAYERS = "remove it: the layers follow config.json"
_SETTING = "put it into the file of --custom-config-path, from which hooks read it"
_PROFILER = "use --profile-target, whose traces hold the memory too"
_TEACHER = (
    "remove it: a teacher is a server at --rm-url (--opd-type sglang) or in the trainer (megatron)"
)
_LOG = "write a --custom-rollout-log-function-path, which sees every sample"
_GEMM = "remove it: matmuls are torch's, or TransformerEngine's with --fp8-format"

FORMER_NAMES: dict[str, str] = {
    "--tensor-parallel-size": "use --tensor-model-parallel-size",
    "--pipeline-parallel-size": "use --pipeline-model-parallel-size",
    "--expert-parallel-size": "use --expert-model-parallel-size",
    "--sglang-router-request-timeout-secs": "use --router-request-timeout-secs",
    # models
    "--use-gated-attention": _LAYERS,
    "--qwen-gdn-backend": _LAYERS,
    "--freeze-indexer": _LAYERS,
    "--fused-select-topk-block-size": _LAYERS,
    "--allgather-cp": "remove it: --cp-comm-type says how context-parallel ranks exchange keys",
    "--enable-experimental": "remove it: no experimental function of megatron-core is used",
    "--padded-vocab-size": "use --make-vocab-size-divisible-by",
    "--megatron-deepgemm-forward-layers": _GEMM,
    "--megatron-deepgemm-forward-modules": _GEMM,
    "--megatron-deepgemm-moe-forward-layers": _GEMM,
    "--megatron-deepgemm-moe-forward-modules": _GEMM,
    # weight updates
    "--custom-update-weight-post-write-path": "remove it: engines load --update-weight-disk-dir themselves",
    # training
    "--release-train": "use --offload-train, which frees the trainer's GPU memory",
    "--reset-optimizer-states": "use --no-load-optim, which resumes with a fresh optimizer state",
    "--use-stateless-adam": "use --optimizer sgd, or --optimizer-cpu-offload to save memory",
    "--use-opsm": "use --use-tis --tis-level geometric --tis-mode mask, which masks sequences too",
    "--opsm-delta": "use --tis-clip and --tis-clip-low with --tis-mode mask",
    "--use-rollout-entropy": "remove it: train/entropy is always logged",
    "--balance-by-flops": "use --balance-data, which balances tokens",
    # rollouts
    "--disable-rollout-global-dataset": "use --data-source-path with a class of your own",
    "--use-distributed-post": "remove it: one process sends up to --sglang-server-concurrency requests",
    "--http-proxy": "set HTTPS_PROXY in the environment of what needs it; engines are called directly",
    "--fetch-trajectory-retry-times": _SETTING,
    "--min-batch-collection-ratio": _SETTING,
    "--rollout-task-type": _SETTING,
    "--load-forge-rollout-data": "use --load-debug-rollout-data",
    "--load-debug-rollout-data-subsample": "remove it: a rollout is trained whole; give a smaller file",
    # teachers
    "--teacher-port": _TEACHER,
    "--teacher-warmup-port": _TEACHER,
    "--teacher-warmup-timeout-s": _TEACHER,
    "--teacher-sample-reduction-chunk-size": _TEACHER,
    "--teacher-label-reduction-chunk-size": _TEACHER,
    "--megatron-server-max-length": _TEACHER,
    "--megatron-server-update-timeout-s": _TEACHER,
    "--megatron-server-warmup": _TEACHER,
    # tracking
    "--wandb-always-use-train-step": "remove it: every metric is logged by rollout_id",
    "--log-multi-turn": _LOG,
    "--log-reward-category": _LOG,
    "--log-correct-samples": _LOG,
    "--memory-snapshot-dir": _PROFILER,
    "--memory-snapshot-num-steps": _PROFILER,
    "--memory-recorder": _PROFILER,
    "--record-memory-history": _PROFILER,
    # SGLang
    "--sglang-enable-ep-moe": "use --sglang-ep-size",
    "--sglang-enable-deepep-moe": "use --sglang-moe-a2a-backend deepep",
    "--sglang-enable-fp32-moe-router": "remove it: it is an option of a patched SGLang",
    "--sglang-custom-pull-weights-pre-read-hook": "remove it: it is an option of a patched SGLang",
    "--sglang-fp8-gemm-runner-backend": "use --sglang-fp8-gemm-backend",
}

# (flag, value) -> what to use instead of the value
FORMER_VALUES: dict[tuple[str, str], str] = {
    ("--loss-mask-type", "qwen3_5"): (
        "use qwen3, which reads every ChatML template that keeps the thinking of a last turn"
    ),
    ("--router-policy", "consistent_hashing"): (
        "sglang-router 0.3.2 does not have it; cache_aware sends requests with a common prefix to one engine"
    ),
}
