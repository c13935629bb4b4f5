"""Derive the values that the user did not give, and resolve the paths of files that a run writes."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from slime.config.checks.file_checks import count_prompts, read_hf_config
from slime.config.datasets import DataSpec, EvalDataset, pair_datasets, read_eval_config
from slime.config.flags.draft import Draft
from slime.config.flags.registry import foreign_flags, own_flags
from slime.config.flags.rollout import (
    ASYNC_ROLLOUT,
    DEFAULT_STALENESS,
    OPD_REWARD,
    SFT_ROLLOUT,
)
from slime.config.flags.spec import option_of
from slime.config.hub import resolve_hub_ids
from slime.config.installed import find_sglang
from slime.config.lora import adapted_experts, derive_lora
from slime.config.sglang_config import derive_models, derive_split, derive_total
from slime.core.errors import ConfigError


def derive(draft: Draft) -> None:
    """Fill in all derived values. Runs after the checks of single values."""
    _derive_mode(draft)
    resolve_hub_ids(draft)
    _derive_cluster(draft)
    _derive_weights(draft)
    derive_lora(draft)
    _derive_lengths(draft)
    _derive_batches(draft)
    _derive_eval(draft)
    draft.derive_if_unset("eps_clip_high", draft["eps_clip"])
    draft.derive_if_unset("over_sampling_batch_size", _groups_at_a_time(draft))
    _derive_micro_batches(draft)
    draft.derive_if_unset("log_probs_max_tokens_per_gpu", draft["max_tokens_per_gpu"])
    if draft["dump_details"]:
        folder = draft["dump_details"].replace("{", "{{").replace("}", "}}")
        draft.derive_if_unset("save_debug_rollout_data", f"{folder}/rollout_data/{{rollout_id}}.pt")
        name = "{rollout_id}_{rank}.pt"
        draft.derive_if_unset("save_debug_train_data", f"{folder}/train_data/{name}")
    if draft["log_probs_chunk_size"] == -1:
        draft.derive("log_probs_chunk_size", _ALL_TOKENS)
    if draft["use_opd"]:
        draft.derive_if_unset("custom_rm_path", OPD_REWARD)
    draft.derive("deterministic", bool(draft["sglang_enable_deterministic_inference"]))
    if draft["sglang_speculative_algorithm"]:
        draft.derive_if_unset("sglang_speculative_num_draft_tokens", 4)
    if draft["train_backend"] == "megatron":
        _derive_megatron(draft)


def _groups_at_a_time(draft: Draft) -> int:
    """Return how many groups generation may run ahead of training without becoming too stale."""
    prompts, staleness = draft["rollout_batch_size"], draft["max_weight_staleness"]
    if not draft["rollout_function_path"].startswith(ASYNC_ROLLOUT):
        return prompts
    return prompts * (1 + (DEFAULT_STALENESS if staleness is None else staleness))


def _derive_micro_batches(draft: Draft) -> None:
    """Fill micro-batches by tokens unless their size is given; padded rows have no token budget."""
    padded = draft["qkv_format"] == "bshd"
    if not padded and not any(map(draft.given, ("micro_batch_size", "use_dynamic_batch_size"))):
        draft.derive("use_dynamic_batch_size", True)
    if draft["use_dynamic_batch_size"]:
        draft.derive_if_unset("max_tokens_per_gpu", _TOKENS_PER_GPU)


_TOKENS_PER_GPU = 4096  # of a micro-batch, unless --max-tokens-per-gpu is given
_ALL_TOKENS = 2**31 - 1  # more than a micro-batch has


def _derive_megatron(draft: Draft) -> None:
    for name in _PARALLEL_SIZES:
        draft.derive_if_unset(name, 1)
    draft.derive_if_unset("expert_tensor_parallel_size", draft["tensor_model_parallel_size"])
    draft.derive_if_unset("use_distributed_optimizer", draft["optimizer"] == "adam")
    if draft["recompute_granularity"] == "full":  # megatron-core needs all three
        draft.derive_if_unset("recompute_method", "uniform")
        draft.derive_if_unset("recompute_num_layers", 1)
    if draft["optimizer_cpu_offload"]:  # the default of Megatron's class offloads nothing
        draft.derive_if_unset("optimizer_offload_fraction", 1.0)
    if adapted_experts(draft):
        draft.derive_if_unset("transformer_impl", "local")  # whose experts can have adapters
    if draft["moe_enable_deepep"]:
        draft.derive_if_unset("moe_token_dispatcher_type", "flex")
    if draft["enable_mtp_training"]:
        draft.derive_if_unset("mtp_loss_scaling_factor", 0.2)
    if draft["use_rollout_routing_replay"]:
        draft.derive("sglang_enable_return_routed_experts", True)


_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def _derive_mode(draft: Draft) -> None:
    if draft["rollout_external_engine_addrs"] and not draft.given("rollout_external"):
        draft.derive("rollout_external", True)
    if draft["rollout_engine"] == "auto":
        sglang = draft["rollout_external"] or (draft.gpus and find_sglang() is not None)
        draft.derive("rollout_engine", "sglang" if sglang else "slime")
    if draft["load_debug_rollout_data"] and not draft["debug_train_only"]:
        draft.derive("debug_train_only", True)
    if draft["run_dir"] is None:
        path = draft["hf_checkpoint"] or "run"
        model = draft["model_name"] or Path(path).resolve().name
        draft.derive("run_dir", f"runs/{model}-{time.strftime('%Y%m%d-%H%M%S')}")
    absolute = str(Path(draft["run_dir"]).expanduser().absolute())
    if absolute != draft["run_dir"]:
        draft.values["run_dir"] = absolute
    resolve_paths(draft)
    precision = "bf16" if draft.gpus else "fp32"
    precision = "bf16" if draft["bf16"] else "fp32" if draft["fp32"] else precision
    draft.derive("precision", precision)


def _derive_cluster(draft: Draft) -> None:
    if draft["actor_num_nodes"] == 1:
        if not draft.given("actor_num_gpus_per_node"):
            draft.derive("actor_num_gpus_per_node", draft.gpus or 1)
        if not draft.given("num_gpus_per_node") and draft.gpus:
            draft.derive("num_gpus_per_node", draft.gpus)
    if not draft.given("distributed_backend") and not draft.gpus:
        draft.derive("distributed_backend", "gloo")
    _derive_engine_size(draft)
    derive_models(draft)
    _derive_placement(draft)
    derive_split(draft)
    for name in ("offload_train", "offload_rollout"):
        if (draft["offload"] or draft["colocate"]) and not draft.given(name):
            draft.derive(name, True)


def _derive_engine_size(draft: Draft) -> None:
    """Make --sglang-tp-size and --rollout-num-gpus-per-engine, two names of one value, agree."""
    tp_size = draft["sglang_tp_size"]
    if tp_size is None:
        return
    if not draft.given("rollout_num_gpus_per_engine"):
        draft.derive("rollout_num_gpus_per_engine", tp_size)
    elif draft["rollout_num_gpus_per_engine"] != tp_size:
        raise ConfigError(
            f"--sglang-tp-size {tp_size} and --rollout-num-gpus-per-engine "
            f"{draft['rollout_num_gpus_per_engine']} are the same value and must agree: remove one"
        )


def _derive_placement(draft: Draft) -> None:
    training = draft.num_training_gpus
    if draft["debug_train_only"] or _needs_no_engine(draft):
        draft.derive("rollout_num_gpus", 0)
        draft.derive("engine_models", [])
        return
    if draft["engine_models"]:
        return derive_total(draft, training)
    if draft["rollout_external"]:
        draft.derive("rollout_num_gpus", len(draft["rollout_external_engine_addrs"] or ()))
        return
    if draft["rollout_num_gpus"] is None and not draft["colocate"]:
        if draft.gpus and not draft["debug_rollout_only"]:
            draft.derive("colocate", True)
        else:
            draft.derive("rollout_num_gpus", draft["rollout_num_gpus_per_engine"])
    if draft["colocate"]:
        if draft.given("rollout_num_gpus") and draft["rollout_num_gpus"] != training:
            draft.warn(
                f"--rollout-num-gpus {draft['rollout_num_gpus']} is not used: with --colocate the "
                f"engines share the {training} training GPUs"
            )
        draft.derive("rollout_num_gpus", training)


def _needs_no_engine(draft: Draft) -> bool:
    custom = draft["eval_interval"] and draft["eval_function_path"]
    evaluates = draft["eval_prompt_data"] or draft["eval_config"] or custom
    return draft["rollout_function_path"] == SFT_ROLLOUT and not evaluates


def _derive_weights(draft: Draft) -> None:
    external = "disk" if draft["rollout_external"] else "distributed"
    draft.derive_if_unset("update_weight_transport", "tensor" if draft["colocate"] else external)
    draft.derive_if_unset("update_weight_disk_dir", str(Path(draft["run_dir"]) / "weights"))


def context_limit(draft: Draft) -> tuple[int | None, str]:
    """Return the maximum tokens of prompt and response together, and what sets it."""
    for name in ("rollout_max_context_len", "sglang_context_length"):
        if draft[name] is not None and draft.given(name):
            return draft[name], f"{option_of(name)} {draft[name]}"
    limit = read_hf_config(draft).get("max_position_embeddings")
    return limit, f"the model's context length of {limit}"


def _derive_lengths(draft: Draft) -> None:
    limit, _ = context_limit(draft)
    if limit is None or draft["rollout_max_response_len"] is not None:
        return
    draft.derive("rollout_max_response_len", limit - (draft["rollout_max_prompt_len"] or 1))
    if not _needs_no_engine(draft):  # a longer prompt leaves fewer response tokens
        draft.derive_if_unset("rollout_max_context_len", limit)


def _derive_batches(draft: Draft) -> None:
    samples = draft["rollout_batch_size"] * draft["n_samples_per_prompt"]
    steps = draft["num_steps_per_rollout"] or 1
    draft.derive_if_unset("global_batch_size", max(samples // steps, 1))
    draft.derive_if_unset("num_steps_per_rollout", max(samples // draft["global_batch_size"], 1))
    if draft["num_rollout"] is None:
        draft.derive("num_rollout", _rollouts_of_epochs(draft))
    elif draft["num_epoch"] is not None:
        draft.warn(
            f"--num-epoch {draft['num_epoch']} has no effect with --num-rollout {draft['num_rollout']}, "
            "which sets the length of the run"
        )
    steps = draft["num_rollout"] * draft["num_steps_per_rollout"]
    draft.derive_if_unset("lr_decay_iters", max(steps, 1))


def _rollouts_of_epochs(draft: Draft) -> int:
    if draft["data_source_path"] != own_flags()["data_source_path"].default:
        raise ConfigError(
            "--num-epoch needs the built-in data source, whose prompts can be counted: give "
            "--num-rollout"
        )
    prompts = sum(count_prompts(spec, draft) for spec in draft["prompt_data"] or [])
    batch = draft["rollout_batch_size"]
    if prompts < batch and not draft.offline:
        raise ConfigError(
            f"--num-epoch: the data holds {prompts} prompts, fewer than --rollout-batch-size {batch}: "
            "lower it, or give --num-rollout"
        )
    return draft["num_epoch"] * (prompts // batch)


def _derive_eval(draft: Draft) -> None:
    for name in ("temperature", "top_p", "top_k", "max_response_len"):
        draft.derive_if_unset(f"eval_{name}", draft[f"rollout_{name}"])
    for name in ("input_key", "label_key", "reward_key"):
        draft.derive_if_unset(f"eval_{name}", draft[name])
    draft.derive_if_unset("eval_function_path", draft["rollout_function_path"])
    draft.derive("eval_datasets", _eval_datasets(draft))


def _eval_datasets(draft: Draft) -> list[EvalDataset]:
    defaults = {
        "n_samples_per_prompt": draft["n_samples_per_eval_prompt"],
        **{name: draft[f"eval_{name}"] for name in _EVAL_FLAGS},
    }
    datasets = pair_datasets(draft["eval_prompt_data"] or [], defaults)
    path = draft["eval_config"]
    if path and draft.need_file(path, "--eval-config"):
        datasets += read_eval_config(path, defaults)
    return datasets


_EVAL_FLAGS = (
    "temperature", "top_p", "top_k", "max_response_len", "max_context_len", "max_prompt_len",
    "min_new_tokens", "input_key", "label_key", "tool_key",
)  # fmt: skip


RUN_DIR = "{run_dir}"
OUTPUTS = (
    "save", "critic_save", "save_hf", "save_debug_rollout_data", "save_debug_train_data", "dump_details",
    "ci_save_grad_norm", "update_weight_disk_dir", "wandb_dir", "tb_project_name",
)  # fmt: skip
_RESUMED_FROM = {"load": "save", "critic_load": "critic_save"}
_CHECKPOINTS = ("save", "critic_save", *_RESUMED_FROM)
_PATTERNS = ("save_hf", "save_debug_rollout_data", "save_debug_train_data")
_INPUTS = (
    "hf_checkpoint", "ref_load", "opd_teacher_load", "eval_config", "sglang_config",
    "megatron_config_path", "custom_config_path", "lora_adapter_path",
    "ci_load_grad_norm",
)  # fmt: skip
_DATA = ("prompt_data", "eval_prompt_data")
_FOREIGN = re.compile(r"_(path|dir|file)$")


def resolve_paths(draft: Draft) -> None:
    """Replace {run_dir} in paths; make checkpoint folders absolute, so that they can be compared.

    {run_dir} stands for --run-dir, so that a stored configuration repeats the run in another folder
    instead of overwriting the first::

        --run-dir runs/first --save runs/first/checkpoints        the command line
        save: '{run_dir}/checkpoints'                             config.yaml
        --config runs/first/config.yaml --run-dir runs/second     saves to runs/second/checkpoints
    """
    for name in (*OUTPUTS, *_RESUMED_FROM):
        value = draft[name]
        if not isinstance(value, str) or not value:
            continue
        run_dir = draft["run_dir"]
        if name in _PATTERNS:  # in which literal braces are doubled
            run_dir = run_dir.replace("{", "{{").replace("}", "}}")
        value = value.replace(RUN_DIR, run_dir)
        if name in _CHECKPOINTS:
            value = str(Path(value).expanduser().absolute())
        draft.values[name] = value


def portable(given: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Return the values for config.yaml: valid in another folder, and for another --run-dir.

    --load is omitted where it equals --save: it resumes this run, and a repetition starts from scratch.
    """
    kept = {name: value for name, value in given.items() if name not in _resume_only(given)}
    return {name: _portable(name, value, run_dir) for name, value in kept.items()}


def _resume_only(given: dict[str, Any]) -> set[str]:
    pairs = _RESUMED_FROM.items()
    same = {load for load, save in pairs if load in given and given[load] == given.get(save)}
    return same | ({"ckpt_step"} if "load" in same else set())


def _portable(name: str, value: Any, run_dir: str) -> Any:
    if name in (*OUTPUTS, *_RESUMED_FROM) and isinstance(value, str):
        path = Path(value).expanduser().absolute()
        inside = path.is_relative_to(run_dir)
        return str(Path(RUN_DIR) / path.relative_to(run_dir) if inside else path)
    if name in _DATA and isinstance(value, list):  # --eval-prompt-data NAME PATH NAME PATH
        first = 0 if name == "prompt_data" or len(value) == 1 else 1
        return [
            _absolute(item, _data_file(item)) if i % (first + 1) == first else item
            for i, item in enumerate(value)
        ]
    if name in _INPUTS or (name in foreign_flags() and _FOREIGN.search(name)):
        return _absolute(value, value) if isinstance(value, str) else value
    if name == "load_debug_rollout_data" and isinstance(value, str):
        return str(Path(value).expanduser().absolute())
    return value


def _absolute(value: str, file: str | None) -> str:
    """Return `value` below the current folder, if `file` exists there."""
    if file is None or Path(file).is_absolute() or not Path(file).exists():
        return value
    return str(Path.cwd() / value)


def _data_file(spec: str) -> str | None:
    try:
        parsed = DataSpec.parse(spec, "--prompt-data")
    except ConfigError:
        return None
    return parsed.path if parsed.task is None else None
