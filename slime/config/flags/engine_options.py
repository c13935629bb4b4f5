"""The --sglang-* flags: options of the installed SGLang, and what the embedded engine supports.

The tables cover 0.5.16 and 0.5.23. A script keeps its options when SGLang is upgraded: an option that
a version does not have is translated to its replacement, or refused with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

from slime.config.flags.registry import all_flags, read_table
from slime.core.errors import ConfigError

Argv = list[str]

# option of SGLang -> what to do instead of setting it
OWNED: dict[str, str] = {
    "model_path": "use --hf-checkpoint",
    "host": "set SLIME_HOST_IP to the address other nodes reach this one at",
    "port": "remove it: slime finds free ports",
    "nccl_port": "remove it: slime finds free ports",
    "dist_init_addr": "remove it: slime connects the nodes of an engine",
    "disaggregation_bootstrap_port": "remove it: slime finds free ports",
    "nnodes": "remove it: it follows from --rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node_rank": "remove it: slime numbers the nodes of an engine",
    "base_gpu_id": "remove it: Ray assigns the GPUs",
    "gpu_id_step": "remove it: Ray assigns the GPUs",
    "enable_memory_saver": "use --offload-rollout, which --colocate implies",
    "admin_api_key": "remove it: every run generates its own key",
    "api_key": "remove it: every run generates its own key",
    "ssl_keyfile": "remove it: engines speak plain HTTP inside the cluster",
    "ssl_certfile": "remove it: engines speak plain HTTP inside the cluster",
    "is_embedding": "remove it: training needs a model that generates",
    "skip_tokenizer_init": "remove it: the text of a response is read from the engine",
}


def check_owned(name: str) -> None:
    """Raise ConfigError if slime sets the --sglang- flag `name` itself."""
    advice = OWNED.get(name.removeprefix("sglang_"))
    if advice is not None:
        raise ConfigError(f"{all_flags()[name].option} is set by slime: {advice}")


def known_version(installed: str) -> str:
    """Return the version of the tables to use for an installed one: the newest that is not newer."""
    known = sorted(read_table("sglang")["versions"], key=_number)
    not_newer = [version for version in known if _number(version) <= _number(installed)]
    return not_newer[-1] if not_newer else known[0]


def sglang_argv(values: dict[str, Any], installed: str) -> Argv:
    """Return the server's options for --sglang-* values by name (without the prefix)."""
    version = known_version(installed)
    values = _merge_attention_dp(dict(values), version)
    return [part for name, value in values.items() for part in _spell(name, value, version)]


def _merge_attention_dp(values: dict[str, Any], version: str) -> dict[str, Any]:
    """Translate options that are one option in one version and two in the other."""
    if version == "0.5.16" and "attn_dp_size" in values:
        values |= {"dp_size": values.pop("attn_dp_size"), "enable_dp_attention": True}
    elif version != "0.5.16" and values.get("enable_dp_attention"):
        del values["enable_dp_attention"]
        values["attn_dp_size"] = values.pop("dp_size", 1)
    return values


def _spell(name: str, value: Any, version: str) -> Argv:
    flag = all_flags()[f"sglang_{name}"]
    option = "--" + flag.option.removeprefix("--sglang-")
    replaced = name in _REPLACED and version != "0.5.16"
    if replaced and not (isinstance(value, bool) and not value):
        return _REPLACED[name](value)
    if version not in flag.versions:
        if replaced or value is False or value == flag.default:
            return []
        raise ConfigError(
            f"{flag.option}: SGLang {version} has no {option}; remove it, or install SGLang "
            f"{flag.versions[0]}"
        )
    if flag.kind == "bool":
        return [option] if value else ["--no-" + option[2:]] if flag.default else []
    if flag.many:
        many: list[Any] = value  # pyright: ignore[reportAssignmentType]
        return [option, *map(str, many)]
    return [option, json.dumps(value) if flag.kind == "json" else str(value)]


def _renamed(option: str) -> Callable[[Any], Argv]:
    def spell(value: Any) -> Argv:
        if isinstance(value, bool):
            return [option]
        return [option, *map(str, value)] if isinstance(value, list) else [option, str(value)]

    return spell


def _instead(*argv: str) -> Callable[[Any], Argv]:
    return lambda value: list(argv)


def _cp_strategy(value: Any) -> Argv:
    names = {"in-seq-split": "zigzag", "round-robin-split": "interleave"}
    return ["--cp-strategy", names.get(value) or str(value)]


# option of 0.5.16 -> its replacement in newer versions
_REPLACED: dict[str, Callable[[Any], Argv]] = {
    "cuda_graph_bs": _renamed("--cuda-graph-bs-decode"),
    "cuda_graph_max_bs": _renamed("--cuda-graph-max-bs-decode"),
    "disable_cuda_graph": _instead(
        "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"
    ),
    "enable_breakable_cuda_graph": _instead("--cuda-graph-backend-prefill", "breakable"),
    "disable_piecewise_cuda_graph": _instead("--cuda-graph-backend-prefill", "disabled"),
    "enforce_piecewise_cuda_graph": _instead("--cuda-graph-backend-prefill", "tc_piecewise"),
    "piecewise_cuda_graph_tokens": _renamed("--cuda-graph-bs-prefill"),
    "piecewise_cuda_graph_max_tokens": _renamed("--cuda-graph-max-bs-prefill"),
    "nsa_prefill_backend": _renamed("--dsa-prefill-backend"),
    "nsa_decode_backend": _renamed("--dsa-decode-backend"),
    "mamba_scheduler_strategy": _renamed("--mamba-radix-cache-strategy"),
    "enable_dsa_prefill_context_parallel": _instead("--enable-prefill-cp"),
    "enable_nsa_prefill_context_parallel": _instead("--enable-prefill-cp"),
    "enable_prefill_context_parallel": _instead("--enable-prefill-cp"),
    "dsa_prefill_cp_mode": _cp_strategy,
    "nsa_prefill_cp_mode": _cp_strategy,
    "prefill_cp_mode": _cp_strategy,
    "stream_output": _instead("--incremental-streaming-output"),
    "elastic_ep_rejoin": _instead("--elastic-ep-join-mode", "recover"),
    "keep_mm_feature_on_device": _instead("--mm-feature-transport", "cuda_ipc"),
    "enable_expert_distribution_metrics": _instead(
        "--expert-balancedness-report-mode", "server_log"
    ),
    "prefill_round_robin_balance": _instead(),  # 0.5.16 accepts it without effect
    "collect_tokens_histogram": _instead(),  # part of --enable-metrics
}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


# Support of SGLang's options by the embedded engine, by their names in ServerArgs; the engine reads it too:
#   honoured  means the same as in SGLang
#   harmless  accepted without effect: it tunes something else in SGLang and never changes a result
#   refused   raises ConfigError; so does a name in neither table
Support = Literal["honoured", "harmless", "refused"]

HONOURED = frozenset({
    "chunked_prefill_size", "context_length", "device", "disable_radix_cache", "dtype",
    "enable_deterministic_inference", "enable_lora", "enable_return_routed_experts",
    "load_format", "log_level", "lora_target_modules", "max_lora_rank", "max_loras_per_batch",
    "max_running_requests", "max_total_tokens", "mem_fraction_static", "page_size",
    "random_seed", "served_model_name", "skip_tokenizer_init", "speculative_algorithm",
    "speculative_num_draft_tokens", "tokenizer_path", "tp_size", "trust_remote_code",
    "weight_version",
})  # fmt: skip

# option -> why it never changes a result
HARMLESS: dict[str, str] = {
    "attention_backend": "there is one attention, in slime's own kernels",
    "prefill_attention_backend": "there is one attention, in slime's own kernels",
    "decode_attention_backend": "there is one attention, in slime's own kernels",
    "sampling_backend": "there is one sampler",
    "cuda_graph_bs": "batch sizes of CUDA graphs are chosen by the engine",
    "cuda_graph_max_bs": "batch sizes of CUDA graphs are chosen by the engine",
    "disable_cuda_graph": "a CUDA graph computes what its kernels do",
    "disable_cuda_graph_padding": "a CUDA graph computes what its kernels do",
    "enable_torch_compile": "the kernels are compiled already",
    "torch_compile_max_bs": "the kernels are compiled already",
    "disable_chunked_prefix_cache": "prefill chunks read the prefix cache in one way",
    "disable_overlap_schedule": "the scheduler decides what overlaps",
    "enable_mixed_chunk": "the scheduler decides what runs together",
    "max_prefill_tokens": "--sglang-chunked-prefill-size bounds a prefill step",
    "schedule_conservativeness": "requests that no longer fit are retracted and continued",
    "schedule_policy": "order of waiting requests; each gets the same tokens",
    "enable_memory_saver": "memory is released without it (--offload-rollout)",
    "decode_log_interval": "lines in the engine's log",
    "stream_interval": "size of the chunks of a streamed response",
    "skip_server_warmup": "the server answers once it is ready",
    "watchdog_timeout": "slime monitors its engines (--rollout-health-check-timeout)",
}


def embedded_support(name: str) -> Support:
    """Return the support of the ServerArgs option `name` (underscores, no prefix)."""
    if name in HONOURED:
        return "honoured"
    return "harmless" if name in HARMLESS else "refused"
