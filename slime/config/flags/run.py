"""Flags that say what is run, where, and how weights travel."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags.spec import flag


@dataclass(kw_only=True)
class Mode:
    """Mode."""

    train_backend: Literal["megatron", "fsdp"] = flag(
        "megatron", "trainer: megatron (tensor, pipeline, context and expert parallel) or fsdp"
    )
    rollout_engine: Literal["auto", "sglang", "slime"] = flag(
        "auto",
        "inference engine: sglang, or slime's embedded one; auto takes sglang where it is installed "
        "and there is a GPU",
    )
    config: str | None = flag(
        None, "YAML file with the same names as the flags; the command line wins over it"
    )
    dry_run: bool = flag(
        False,
        "resolve the flags, check them, hooks and the files that are here as a start would, print each "
        "value with where it came from, the placement and the plan, and start nothing",
    )
    run_dir: str = flag(
        None,
        "folder for the resolved config, metrics, logs and the report; default: "
        "runs/<model>-<date>-<time>",
    )
    train_async: bool = flag(
        False,
        "generate the next rollout while this one is trained on, on processors of its own; the same as "
        "python train_async.py",
    )
    debug_rollout_only: bool = flag(False, "generate and score, but start no trainer")
    debug_train_only: bool = flag(
        False, "train on rollouts that --load-debug-rollout-data gives, but start no engine"
    )
    load_debug_rollout_data: str | None = flag(
        None,
        "train on rollouts that --save-debug-rollout-data wrote; '{rollout_id}' in the path is "
        "replaced by the number; implies --debug-train-only",
    )


@dataclass(kw_only=True)
class Cluster:
    """Cluster."""

    actor_num_nodes: int = flag(1, "nodes that train")
    actor_num_gpus_per_node: int = flag(
        8,
        "GPUs that train on each of these nodes; without the flag, on one machine: the GPUs it has, "
        "or 1 without a GPU (each is then a CPU process)",
    )
    rollout_num_gpus: int = flag(
        None,
        "GPUs for inference in all; default: the training GPUs (--colocate) where there are GPUs, "
        "else one engine",
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "GPUs of one engine, its tensor parallel size; --sglang-tp-size is the same"
    )
    num_gpus_per_node: int = flag(
        8, "GPUs a node has; without the flag, on one machine: the GPUs it has"
    )
    colocate: bool = flag(
        False, "training and inference share the same GPUs, each leaving them while the other works"
    )
    offload: bool = flag(False, "the same as --offload-train --offload-rollout")
    offload_train: bool = flag(
        False, "the trainer leaves the GPU while engines generate; on with --colocate"
    )
    offload_rollout: bool = flag(
        False, "engines leave the GPU while the trainer works; on with --colocate"
    )
    distributed_backend: Literal["nccl", "gloo"] = flag(
        "nccl", "collective backend of the trainer; gloo where there is no GPU"
    )
    distributed_timeout_minutes: int = flag(10, "deadline of one collective operation")
    train_env_vars: dict[str, str] = flag(
        {}, 'environment variables of the trainer processes, as JSON: \'{"NAME": "value"}\''
    )


@dataclass(kw_only=True)
class Weights:
    """Weight updates."""

    update_weight_buffer_size: int = flag(
        512 * 1024**2, "bytes gathered and sent to the engines at a time"
    )
    update_weights_interval: int = flag(1, "rollouts between two weight updates")
    update_weight_transport: Literal["tensor", "distributed", "disk"] = flag(
        None,
        "tensor (shared memory or CUDA IPC), distributed (NCCL or gloo broadcast) or disk; default: "
        "tensor with --colocate, disk with --rollout-external, else distributed",
    )
    update_weight_disk_dir: str = flag(
        None, "folder that trainer and engines share, for disk; default: weights/ in the run folder"
    )
    check_weight_update_equal: bool = flag(
        True, "after every update, compare checksums of what the engines hold with what was sent"
    )


@dataclass(kw_only=True)
class FaultTolerance:
    """Fault tolerance."""

    phase_timeout_minutes: dict[str, float] = flag(
        {},
        "deadline of a phase, after which the run says where every process is and ends, as JSON: "
        "'{\"train\": 60}'; default: start 120, generate 240, log_probs 120, train 240, "
        "update_weights 60, save 120, eval 240",
    )
    use_fault_tolerance: bool = flag(True, "check the engines' health and restart those that fail")
    rollout_health_check_interval: float = flag(30.0, "seconds between two health checks")
    rollout_health_check_timeout: float = flag(30.0, "seconds an engine has to answer one")
    rollout_health_check_first_wait: float = flag(
        0.0, "seconds to wait after the start before the first check"
    )
    rollout_no_engine_timeout: float = flag(
        1800.0, "seconds without any engine, while they are restarted, until the run saves and ends"
    )


@dataclass(kw_only=True)
class Tracking:
    """Tracking."""

    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(
        None, "how Weights & Biases logs; default: what WANDB_MODE says, else online"
    )
    wandb_dir: str | None = flag(None, "folder for its files; default: the run folder")
    wandb_key: str | None = flag(None, "API key; better in WANDB_API_KEY", secret=True)
    wandb_host: str | None = flag(None, "address of a server of your own")
    wandb_team: str | None = flag(None, "team (entity)")
    wandb_group: str | None = flag(None, "group of the run")
    wandb_project: str | None = flag(None, "project")
    wandb_run_id: str | None = flag(None, "id of the run to continue")
    use_tensorboard: bool = flag(False, "log to TensorBoard")
    tb_project_name: str | None = flag(
        None, "folder of the TensorBoard files; default: tensorboard/ in the run folder"
    )
    tb_experiment_name: str | None = flag(None, "folder of this run inside it")
    log_passrate: bool = flag(False, "log pass@k of the training rollouts")
    save_debug_rollout_data: str | None = flag(
        None, "write every rollout to this path; '{rollout_id}' is replaced by its number"
    )
    save_debug_train_data: str | None = flag(
        None,
        "write every rank's training rows to this path; '{rollout_id}' and '{rank}' are replaced",
    )
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] | None = flag(
        None, "parts of the training to record with torch's profiler"
    )
    custom_rollout_log_function_path: str | None = flag(
        None,
        "fn(rollout_id, args, samples, extra_metrics, rollout_time); True skips the default log",
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "fn(rollout_id, args, data, extra_metrics); True skips the default log"
    )
