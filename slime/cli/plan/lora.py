"""LoRA in a plan: flags to propose if full training does not fit, and the cost of an adapter update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.backends.model_size import ModelCount
from slime.cli.plan.model_shape import Shape
from slime.cli.plan.trainer_memory import adapter_bytes
from slime.config.arguments import Args
from slime.config.flags.spec import option_of
from slime.config.lora import served_adapter

# Assumed: one copy from the GPU to host memory and one back, the requests to an engine (pause, load, resume),
# and the overhead per tensor.
_GB_PER_S, _REQUESTS_S, _TENSOR_S = 10e9, 3e-3, 10e-6
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT_MODULES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class AdapterCost:
    """An adapter and its update: 33,030,144 parameters of Qwen3-4B with rank 16 are 66 MB in bf16."""

    parameters: int
    sent_bytes: int  # in an update: those of the adapter, or of all weights if it is merged
    seconds: float | None  # of an update of the adapter alone, assumed

    def __str__(self) -> str:
        size = f"{self.parameters:,} parameters"
        if self.seconds is None:
            return f"{size}; updates send merged weights, {self.sent_bytes / 1e9:.2f} GB"
        return (
            f"{size}; updates send {self.sent_bytes / 1e6:.1f} MB in about "
            f"{1000 * self.seconds:.0f} ms (assumed: {_GB_PER_S / 1e9:.0f} GB/s through host memory)"
        )


def adapter_cost(args: Args, count: ModelCount, layers: int) -> AdapterCost | None:
    """Return what the adapter of a run costs; None without LoRA."""
    adapters = count.adapters
    if adapters is None:
        return None
    element = 2 if args.precision == "bf16" else 4
    alone = adapter_bytes(args, adapters)
    seconds = _REQUESTS_S + 2 * adapters.modules * layers * _TENSOR_S + alone / _GB_PER_S
    is_alone = served_adapter(args) is not None
    return AdapterCost(
        parameters=adapters.rank * adapters.widths,
        sent_bytes=alone if is_alone else count.whole.total * element,
        seconds=seconds if is_alone else None,
    )


def lora_values(args: Args, shape: Shape) -> dict[str, Any]:
    """Return the flags that make a run of full training one of LoRA with FSDP, by name.

    Experts have no adapters; updates send the adapter alone.
    """
    values: dict[str, Any] = {"train_backend": "fsdp", "gradient_checkpointing": True}
    values |= {"lora_rank": 16, "lora_alpha": 32.0}
    if shape.num_experts:
        values["lora_target_modules"] = list(_LATENT_MODULES if shape.latent else _MODULES)
    values |= {"sglang_enable_lora": True, "sglang_max_lora_rank": values["lora_rank"]}
    return values | ({"sglang_max_loras_per_batch": 1} if args.rollout_engine == "slime" else {})


def typed_lora(values: dict[str, Any]) -> list[str]:
    """Return these flags as they are typed, without those that a run derives."""
    return typed_flags({n: v for n, v in values.items() if not n.startswith("sglang_")})


def typed_flags(values: dict[str, Any]) -> list[str]:
    """Return ["--lora-rank 16", "--gradient-checkpointing"] for {"lora_rank": 16, ...}."""
    return [f"{option_of(name)} {_typed(value)}".strip() for name, value in values.items()]


def _typed(value: object) -> str:
    if isinstance(value, list):
        return " ".join(value)
    return "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
