"""What the embedded engine does with each of SGLang's options.

honoured  it means there what it means in SGLang
harmless  accepted; it tunes something the embedded engine does in its own way, never the result
refused   the embedded engine cannot do it: setting it is an error at validation

The engine takes this table from here (`slime.engine` may import `slime.utils`, not the other way
round). Names are ServerArgs' own, without `sglang_`; a name in neither set is refused.
docs/arguments.md shows this table: `python -m slime.utils.flags.docs` writes it anew.
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

HARMLESS = frozenset(
    {
        "attention_backend",
        "cuda_graph_bs",
        "cuda_graph_max_bs",
        "decode_attention_backend",
        "decode_log_interval",
        "disable_chunked_prefix_cache",
        "disable_cuda_graph",
        "disable_cuda_graph_padding",
        "disable_overlap_schedule",
        "enable_memory_saver",
        "enable_mixed_chunk",
        "enable_torch_compile",
        "max_prefill_tokens",
        "prefill_attention_backend",
        "sampling_backend",
        "schedule_conservativeness",
        "schedule_policy",
        "skip_server_warmup",
        "stream_interval",
        "torch_compile_max_bs",
        "watchdog_timeout",
    }
)

EMBEDDED_OPTIONS: dict[str, Support] = {
    **dict.fromkeys(sorted(HONOURED), "honoured"),
    **dict.fromkeys(sorted(HARMLESS), "harmless"),
}


def embedded_support(name: str) -> Support:
    """Support for the ServerArgs option `name` (underscores, no prefix)."""
    return EMBEDDED_OPTIONS.get(name, "refused")
