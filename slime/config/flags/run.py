"""Flags of the run: mode, cluster, weight updates, fault tolerance, tracking."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from slime.config.flags.rollout import WITHOUT_ENGINE
from slime.config.flags.spec import equals, flag, is_set
from slime.core.errors import ConfigError

_ALL_SENT = "every update sends all weights"
NO_TRAINER = is_set("debug_rollout_only", note="which starts no trainer")
_wandb_flag = partial(flag, needs="use_wandb")
# Timeouts of the phases of a run. Generous: loading a checkpoint of hundreds of gigabytes may take
# an hour, and so may one response.
PHASE_MINUTES = {
    "start": 120.0,
    "generate": 240.0,
    "log_probs": 120.0,
    "train": 240.0,
    "update_weights": 60.0,
    "save": 120.0,
    "eval": 240.0,
}


def phase_timeouts(minutes: dict[str, float]) -> dict[str, float]:
    """Return the timeout of every phase in seconds; `minutes` overrides the defaults."""
    for name, value in minutes.items():
        if name not in PHASE_MINUTES:
            raise ConfigError(
                f"--phase-timeout-minutes: there is no phase {name!r}; one of "
                + ", ".join(PHASE_MINUTES)
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(
                f"--phase-timeout-minutes: {name} must be a number above 0, not {value}"
            )
    return {name: 60.0 * minutes.get(name, default) for name, default in PHASE_MINUTES.items()}


@dataclass(kw_only=True)
class Mode:
    """Mode."""

    train_backend: Literal["megatron", "fsdp"] = flag(
        "megatron",
        "trainer: megatron (tensor, pipeline, context and expert parallel) or fsdp (expert parallel)",
    )
    rollout_engine: Literal["auto", "sglang", "slime"] = flag(
        "auto",
        "inference engine: sglang, or slime's embedded one; auto uses sglang if it is "
        "installed and there is a GPU",
    )
    config: str | None = flag(
        None, "YAML file with the same names as the flags; the command line overrides it"
    )
    custom_config_path: str | None = flag(
        None,
        "YAML file of settings for hooks: its keys, which must not be flags, become attributes of args",
    )
    dry_run: bool = flag(
        False,
        "resolve and check flags, hooks and files as a start would, print what was set, derived and "
        "checked, the placement and, for GPUs, the memory plan, and start nothing; with --all every value",
    )
    run_dir: str = flag(
        None,
        "folder for the resolved config, metrics, logs and report; default: "
        "runs/<model>-<date>-<time>",
    )
    watch: bool = flag(
        False,
        "serve a live page of the run on this machine while it runs, and print its URL; the same "
        "as slime watch RUN_DIR",
    )
    train_async: bool = flag(
        False,
        "generate the next rollout while training on the current one, on separate GPUs; the same "
        "as python train_async.py",
    )
    debug_rollout_only: bool = flag(
        False, "generate and score, without a trainer", excludes="debug_train_only"
    )
    debug_train_only: bool = flag(
        False,
        "train without an engine, on rollouts of --load-debug-rollout-data or of a rollout function that "
        "needs none, such as the one for SFT",
        requires=is_set("load_debug_rollout_data", note="give the rollouts to train on")
        | WITHOUT_ENGINE,
    )
    load_debug_rollout_data: str | None = flag(
        None,
        "train on rollouts that --save-debug-rollout-data wrote; '{rollout_id}' in the path is "
        "replaced by the rollout's number; implies --debug-train-only",
    )


@dataclass(kw_only=True)
class Cluster:
    """Cluster."""

    actor_num_nodes: int = flag(1, "nodes of the trainer", min=1)
    actor_num_gpus_per_node: int = flag(
        8,
        "GPUs of the trainer on each of its nodes; default on one machine: all its GPUs, or 1 CPU "
        "process without a GPU",
        min=1,
    )
    rollout_num_gpus: int = flag(
        None,
        "total GPUs for inference; default: the training GPUs (--colocate), "
        "or one engine without GPUs",
        min=0,
    )
    rollout_num_gpus_per_engine: int = flag(
        1, "GPUs of one engine, its tensor parallel size; the same as --sglang-tp-size", min=1
    )
    num_gpus_per_node: int = flag(8, "GPUs of a node; default on one machine: all its GPUs", min=1)
    # What is refused with it: checks/layout_checks.py (transport), checks/engine_checks.py (external
    # engines), checks/combinations.py (offload), train_async.py, rollout/hooks.py (never-ending rollouts).
    colocate: bool = flag(
        False,
        "run training and inference on the same GPUs; each releases its memory while the other "
        "works",
    )
    offload: bool = flag(False, "the same as --offload-train --offload-rollout")
    offload_train: bool = flag(
        False, "release the trainer's GPU memory while engines generate; on with --colocate"
    )
    offload_rollout: bool = flag(
        False, "release the engines' GPU memory while the trainer works; on with --colocate"
    )
    distributed_backend: Literal["nccl", "gloo"] = flag(
        "nccl", "collective backend of the trainer; gloo without GPUs"
    )
    distributed_timeout_minutes: int = flag(10, "timeout of one collective operation", min=1)
    train_env_vars: dict[str, str] = flag(
        {}, 'environment variables of the trainer processes, as JSON: \'{"NAME": "value"}\''
    )


@dataclass(kw_only=True)
class Weights:
    """Weight updates."""

    update_weight_buffer_size: int = flag(
        512 * 1024**2, "bytes per bucket of weights sent to the engines", min=1
    )
    update_weights_interval: int = flag(1, "rollouts between two weight updates", min=1)
    update_weight_transport: Literal["tensor", "distributed", "disk"] = flag(
        None,
        "tensor (shared memory or CUDA IPC), distributed (NCCL or gloo broadcast) or disk; "
        "default: tensor with --colocate, disk with --rollout-external, else distributed; nccl is another name "
        "of distributed",
        same_values={"nccl": "distributed"},
    )
    update_weight_disk_dir: str = flag(
        None,
        "folder shared by trainer and engines; default: weights/ in the run folder",
        needs=equals("update_weight_transport", "disk"),
    )
    update_weight_disk_keep_files: bool = flag(
        False,
        "keep the weights of every update instead of the newest ones only",
        needs=equals("update_weight_transport", "disk"),
    )
    update_weight_mode: Literal["full", "delta"] = flag(
        "full",
        "every update sends all weights; delta is accepted for scripts of other versions",
        ignored=_ALL_SENT,
    )
    update_weight_delta_encoding: str | None = flag(None, "", ignored=_ALL_SENT)
    update_weight_delta_checksum: str | None = flag(None, "", ignored=_ALL_SENT)
    update_weight_local_checkpoint_dir: str | None = flag(None, "", ignored=_ALL_SENT)
    check_weight_update_equal: bool = flag(
        True, "after every update, compare checksums of the engines' weights with what was sent"
    )


@dataclass(kw_only=True)
class FaultTolerance:
    """Fault tolerance."""

    phase_timeout_minutes: dict[str, float] = flag(
        {},
        "timeouts of phases, as JSON: '{\"train\": 60}'; a phase that takes longer ends the run "
        "with the status of every process. Default: "
        + ", ".join(f"{name} {minutes:g}" for name, minutes in PHASE_MINUTES.items()),
    )
    use_fault_tolerance: bool = flag(True, "check the engines' health and restart those that fail")
    rollout_health_check_interval: float = flag(
        30.0, "seconds between two health checks", above=0, needs="use_fault_tolerance"
    )
    rollout_health_check_timeout: float = flag(
        30.0, "timeout of a health check in seconds", above=0, needs="use_fault_tolerance"
    )
    rollout_health_check_first_wait: float = flag(
        0.0,
        "additional seconds before the first health check of each generation and evaluation",
        min=0,
        needs="use_fault_tolerance",
    )
    rollout_no_engine_timeout: float = flag(
        1800.0,
        "seconds without any engine, while engines restart, after which the run saves and ends",
        above=0,
    )


@dataclass(kw_only=True)
class Tracking:
    """Tracking."""

    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: Literal["online", "offline", "disabled"] | None = _wandb_flag(
        None, "mode of Weights & Biases; default: WANDB_MODE, else online"
    )
    wandb_dir: str | None = _wandb_flag(None, "folder for its files; default: the run folder")
    wandb_key: str | None = _wandb_flag(None, "API key; better set WANDB_API_KEY", secret=True)
    wandb_host: str | None = _wandb_flag(None, "address of a self-hosted server")
    wandb_team: str | None = _wandb_flag(None, "team (entity)")
    wandb_group: str | None = _wandb_flag(None, "group of the run")
    wandb_project: str | None = _wandb_flag(None, "project")
    wandb_run_id: str | None = _wandb_flag(None, "id of the run to resume")
    disable_wandb_random_suffix: bool = flag(
        False, "", ignored="a run is named after its folder, without a suffix"
    )
    use_tensorboard: bool = flag(False, "log to TensorBoard")
    tb_project_name: str | None = flag(
        None,
        "folder for the TensorBoard files; default: tensorboard/ in the run folder",
        needs="use_tensorboard",
    )
    tb_experiment_name: str | None = flag(
        None,
        "folder of this run inside it; default: the name of the run folder",
        needs="use_tensorboard",
    )
    log_passrate: bool = flag(False, "log pass@k of the training rollouts")
    log_samples: int = flag(
        8,
        "samples of each rollout and of each evaluation dataset whose text and tokens the run folder "
        "keeps; it keeps the numbers of all samples",
        min=0,
    )
    save_debug_rollout_data: str | None = flag(
        None, "write every rollout to this path; '{rollout_id}' is replaced by the rollout's number"
    )
    save_debug_train_data: str | None = flag(
        None,
        "write every rank's training rows to this path; '{rollout_id}' and '{rank}' are replaced",
        unless=NO_TRAINER,
    )
    dump_details: str | None = flag(
        None,
        "folder for every rollout and every rank's training rows: --save-debug-rollout-data and "
        "--save-debug-train-data in one",
    )
    profile_target: list[Literal["train_overall", "train_actor", "train_log_probs"]] | None = flag(
        None, "parts of the training to record with torch's profiler", unless=NO_TRAINER
    )
    custom_rollout_log_function_path: str | None = flag(
        None,
        "fn(rollout_id, args, samples, extra_metrics, rollout_time); if it returns True, the "
        "default log is skipped",
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None,
        "fn(rollout_id, args, data, extra_metrics); if it returns True, the default log is skipped",
        needs="eval_interval",
    )


@dataclass(kw_only=True)
class Checks:
    """Checks."""

    ci_test: bool = flag(
        False,
        "end the run with an error if the engine's and the trainer's log-probs differ, or if the KL to the "
        "reference (--use-kl-loss) is not 0 in a first rollout of one step",
        unless=NO_TRAINER,
    )
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "largest mean absolute difference of these log-probs", min=0, needs="ci_test"
    )
    ci_disable_kl_checker: bool = flag(False, "do not check the KL", needs="ci_test")
    ci_save_grad_norm: str | None = flag(
        None, "file for the norm of the gradient in each rollout", needs="ci_test"
    )
    ci_load_grad_norm: str | None = flag(
        None,
        "file of --ci-save-grad-norm; a norm that differs by more than 5 percent ends the run",
        needs="ci_test",
    )
