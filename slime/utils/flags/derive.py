"""Values that follow from others when the user does not give them."""

from __future__ import annotations

import re
import time
from pathlib import Path

from slime.utils.errors import ConfigError
from slime.utils.eval_config import EvalDataset, pair_datasets, read_eval_config
from slime.utils.flags.draft import Draft
from slime.utils.flags.gpus import count_gpus, is_installed
from slime.utils.flags.hf_config import read_hf_config

SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"


def derive(draft: Draft) -> None:
    """Fill in every value that has a rule; runs after the checks of single values."""
    _derive_mode(draft)
    _derive_cluster(draft)
    _derive_weights(draft)
    _derive_lengths(draft)
    _derive_batches(draft)
    _derive_eval(draft)
    draft.derive_if_unset("eps_clip_high", draft["eps_clip"])
    draft.derive_if_unset("over_sampling_batch_size", draft["rollout_batch_size"])
    draft.derive_if_unset("log_probs_max_tokens_per_gpu", draft["max_tokens_per_gpu"])
    draft.derive("deterministic", bool(draft["sglang_enable_deterministic_inference"]))
    draft.derive_if_unset("use_distributed_optimizer", draft["train_backend"] == "megatron")


def _derive_mode(draft: Draft) -> None:
    if draft["rollout_engine"] == "auto":
        draft.derive("rollout_engine", "slime")
    if draft["load_debug_rollout_data"] and not draft["debug_train_only"]:
        draft.derive("debug_train_only", True)
    if draft["run_dir"] is None:
        path = draft["hf_checkpoint"] or "run"
        model = draft["model_name"] or Path(path).resolve().name
        draft.derive("run_dir", f"runs/{model}-{time.strftime('%Y%m%d-%H%M%S')}")
    absolute = str(Path(draft["run_dir"]).expanduser().absolute())
    if absolute != draft["run_dir"]:
        draft.values["run_dir"] = absolute
    precision = "bf16" if count_gpus() else "fp32"
    precision = "bf16" if draft["bf16"] else "fp32" if draft["fp32"] else precision
    draft.derive("precision", precision)


def _derive_cluster(draft: Draft) -> None:
    gpus = count_gpus()
    if draft["actor_num_nodes"] == 1:
        if not draft.given("actor_num_gpus_per_node"):
            draft.derive("actor_num_gpus_per_node", gpus or 1)
        if not draft.given("num_gpus_per_node") and gpus:
            draft.derive("num_gpus_per_node", gpus)
    if not draft.given("distributed_backend") and not gpus:
        draft.derive("distributed_backend", "gloo")
    _derive_engine_size(draft)
    _derive_placement(draft, gpus)
    for name in ("offload_train", "offload_rollout"):
        if (draft["offload"] or draft["colocate"]) and not draft.given(name):
            draft.derive(name, True)


def _derive_engine_size(draft: Draft) -> None:
    """--sglang-tp-size and --rollout-num-gpus-per-engine are one value under two names."""
    tp_size = draft["sglang_tp_size"]
    if tp_size is None:
        return
    if not draft.given("rollout_num_gpus_per_engine"):
        draft.derive("rollout_num_gpus_per_engine", tp_size)
    elif draft["rollout_num_gpus_per_engine"] != tp_size:
        raise ConfigError(
            f"--sglang-tp-size {tp_size} and --rollout-num-gpus-per-engine "
            f"{draft['rollout_num_gpus_per_engine']} are the same thing and must agree: leave one out"
        )


def _derive_placement(draft: Draft, gpus: int) -> None:
    training = draft["actor_num_nodes"] * draft["actor_num_gpus_per_node"]
    if draft["debug_train_only"] or _needs_no_engine(draft):
        draft.derive_if_unset("rollout_num_gpus", 0)
    elif draft["rollout_num_gpus"] is None and not draft["colocate"]:
        if gpus and not draft["debug_rollout_only"]:
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
    evaluates = draft["eval_prompt_data"] or draft["eval_config"]
    return draft["rollout_function_path"] == SFT_ROLLOUT and not evaluates


def _derive_weights(draft: Draft) -> None:
    if draft["update_weight_transport"] is None:
        external = "disk" if draft["rollout_external"] else "distributed"
        draft.derive("update_weight_transport", "tensor" if draft["colocate"] else external)
    draft.derive_if_unset("update_weight_disk_dir", str(Path(draft["run_dir"]) / "weights"))


def _derive_lengths(draft: Draft) -> None:
    if draft["rollout_max_response_len"] is not None:
        return
    limit = draft["rollout_max_context_len"] or draft["sglang_context_length"]
    limit = limit or read_hf_config(draft).get("max_position_embeddings")
    if limit:
        draft.derive("rollout_max_response_len", limit - (draft["rollout_max_prompt_len"] or 1))


def _derive_batches(draft: Draft) -> None:
    samples = draft["rollout_batch_size"] * draft["n_samples_per_prompt"]
    if draft["global_batch_size"] is None:
        steps = draft["num_steps_per_rollout"] or 1
        draft.derive("global_batch_size", max(samples // steps, 1))
    if draft["num_steps_per_rollout"] is None:
        draft.derive("num_steps_per_rollout", max(samples // draft["global_batch_size"], 1))
    if draft["num_rollout"] is None and draft["num_epoch"] is not None:
        prompts = sum(count_prompts(spec, draft) for spec in draft["prompt_data"] or [])
        draft.derive("num_rollout", draft["num_epoch"] * (prompts // draft["rollout_batch_size"]))
    if draft["num_rollout"] is not None:
        steps = draft["num_rollout"] * draft["num_steps_per_rollout"]
        draft.derive_if_unset("lr_decay_iters", max(steps, 1))


def count_prompts(spec: str, draft: Draft) -> int:
    """Rows of a `path` or `path@[a:b]`, before any filter by length."""
    path, start, stop = split_slice(spec)
    if not draft.need_file(path, "--prompt-data"):
        return 0
    if path.endswith(".parquet"):
        if not is_installed("pyarrow"):
            draft.lacking("--num-epoch with parquet data needs pyarrow: pip install pyarrow")
            return 0
        import pyarrow.parquet

        rows = pyarrow.parquet.ParquetFile(path).metadata.num_rows
    else:
        with open(path, "rb") as file:
            rows = sum(1 for line in file if line.strip())
    return len(range(rows)[start:stop])


def split_slice(spec: str) -> tuple[str, int | None, int | None]:
    """'data.jsonl@[0:100]' -> ('data.jsonl', 0, 100)."""
    match = re.fullmatch(r"(.+)@\[(-?\d*):(-?\d*)\]", spec)
    if match is None:
        return spec, None, None
    return match[1], int(match[2]) if match[2] else None, int(match[3]) if match[3] else None


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
        **{name: draft[name] for name in _SHARED_FLAGS},
    }
    datasets = pair_datasets(draft["eval_prompt_data"] or [], defaults)
    path = draft["eval_config"]
    if path and draft.need_file(path, "--eval-config"):
        datasets += read_eval_config(path, defaults)
    return datasets


_EVAL_FLAGS = (
    "temperature",
    "top_p",
    "top_k",
    "max_response_len",
    "input_key",
    "label_key",
    "reward_key",
)
_SHARED_FLAGS = (
    "metadata_key",
    "tool_key",
    "apply_chat_template",
    "rm_type",
    "custom_rm_path",
    "custom_generate_function_path",
)
