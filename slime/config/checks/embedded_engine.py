"""Which of SGLang's options the embedded engine supports.

honoured  means the same as in SGLang
harmless  accepted without effect: it tunes something else in SGLang and never changes a result
refused   raises ConfigError

Names are those of ServerArgs, without `sglang_`; a name in neither table is refused. The engine reads
this table too. docs/arguments.md shows it: `python -m slime.config.flags.docs` regenerates it.
"""

from __future__ import annotations

from typing import Literal

Support = Literal["honoured", "harmless", "refused"]

HONOURED = frozenset(
    {
        "chunked_prefill_size",
        "context_length",
        "device",
        "disable_radix_cache",
        "dtype",
        "enable_deterministic_inference",
        "enable_return_routed_experts",
        "load_format",
        "log_level",
        "max_running_requests",
        "max_total_tokens",
        "mem_fraction_static",
        "page_size",
        "random_seed",
        "served_model_name",
        "skip_tokenizer_init",
        "speculative_algorithm",
        "speculative_num_draft_tokens",
        "tokenizer_path",
        "tp_size",
        "trust_remote_code",
        "weight_version",
    }
)

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
    "watchdog_timeout": "slime watches its engines (--rollout-health-check-timeout)",
}

EMBEDDED_OPTIONS: dict[str, Support] = {
    **dict.fromkeys(sorted(HONOURED), "honoured"),
    **dict.fromkeys(sorted(HARMLESS), "harmless"),
}


def embedded_support(name: str) -> Support:
    """Return the support of the ServerArgs option `name` (underscores, no prefix)."""
    return EMBEDDED_OPTIONS.get(name, "refused")
