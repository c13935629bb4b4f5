"""Megatron's flags for FP8 and for the precision of the optimizer's tensors, against GPUs and packages."""

from __future__ import annotations

from typing import Any

from slime.config.flags.draft import Draft
from slime.config.flags.spec import option_of
from slime.config.installed import is_installed
from slime.core.errors import ConfigError
from slime.utils.machine import compute_capability, torch_cuda_version

_OPTIMIZER_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_OF_DELAYED_SCALING = (
    "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "tp_only_amax_red",
)  # fmt: skip
_FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# Sizes in config.json -> the flag with the number of ranks that split them
_CUT_BY = {
    "hidden_size": None,
    "intermediate_size": "tensor_model_parallel_size",
    "moe_intermediate_size": "expert_tensor_parallel_size",
}


def check_precision_aware(draft: Draft) -> None:
    """Refuse what TransformerEngine's FusedAdam or megatron-core's CPU optimizer would not honour."""
    _check_dtypes(draft)
    if not draft["use_precision_aware_optimizer"]:
        return
    if not draft["use_distributed_optimizer"]:
        raise ConfigError(
            "--use-precision-aware-optimizer needs the distributed optimizer: remove "
            "--no-use-distributed-optimizer"
        )
    if draft["optimizer_cpu_offload"]:
        return
    if not is_installed("transformer_engine"):
        draft.lacking(
            "--use-precision-aware-optimizer needs TransformerEngine's FusedAdam unless "
            "--optimizer-cpu-offload is set: install transformer-engine or add that flag"
        )
    if draft["fp32"]:
        raise ConfigError(
            "--use-precision-aware-optimizer keeps main parameters beside those in bf16, and this run "
            "trains in fp32: remove it, or add --bf16"
        )


def _check_dtypes(draft: Draft) -> None:
    for name in _OPTIMIZER_DTYPES:
        option, value = option_of(name), draft[name]
        if not draft.given(name) or value == "fp32":
            continue
        if value == "fp8":
            raise ConfigError(
                f"{option} fp8 is not honoured: FusedAdam divides by a tensor's largest entry, so the "
                "moments of an expert without tokens, all 0, become NaN: use bf16"
            )
        if not draft["use_precision_aware_optimizer"]:
            raise ConfigError(
                f"{option} {value} needs --use-precision-aware-optimizer: add it, or remove {option}"
            )
        if draft["optimizer_cpu_offload"] and name != "main_grads_dtype":
            raise ConfigError(
                f"{option} {value}: with --optimizer-cpu-offload the optimizer's tensors are fp32 in "
                "host memory: remove one of the two"
            )
    if draft["main_grads_dtype"] == "bf16" and draft["accumulate_allreduce_grads_in_fp32"]:
        raise ConfigError(
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 are mutually exclusive: remove "
            "one"
        )


def check_fp8(draft: Draft, config: dict[str, Any]) -> None:
    """Refuse FP8 that the card, CUDA or the model's sizes do not allow; `config` is config.json."""
    if not draft["fp8_format"]:
        for name in draft.given_names():
            if name.startswith("fp8_") and draft[name] not in (None, False):
                raise ConfigError(
                    f"{option_of(name)} has no effect without FP8: add --fp8-format hybrid, or remove "
                    f"{option_of(name)}"
                )
        return
    recipe = draft["fp8_recipe"] or "delayed"
    if recipe not in _FP8_RECIPES:
        raise ConfigError(
            f"--fp8-recipe {recipe} is not honoured: use delayed, tensorwise, blockwise or mxfp8"
        )
    for name in _OF_DELAYED_SCALING:
        if draft.given(name) and recipe != "delayed":
            draft.warn(f"{option_of(name)} has no effect with --fp8-recipe {recipe}")
    _check_sizes(draft, config, recipe)
    if draft.gpus and not draft.offline and not draft.cluster:
        refusal = fp8_refusal(recipe, compute_capability(), torch_cuda_version())
        if refusal is not None:
            raise ConfigError(refusal)


def fp8_refusal(recipe: str, capability: tuple[int, int] | None, cuda: str | None) -> str | None:
    """Return why a GPU cannot compute in this recipe, None if it can or nothing is known of it."""
    if capability is None:
        return None
    card = f"compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 9):
        return f"--fp8-format needs a GPU of compute capability 8.9 or higher, this one has {card}: remove it"
    if recipe == "mxfp8" and not (10, 0) <= capability < (12, 0):
        return (
            f"--fp8-recipe mxfp8 needs a GPU of compute capability 10.x, this one has {card}: use "
            "tensorwise or blockwise"
        )
    if recipe == "blockwise" and capability < (9, 0):
        return (
            f"--fp8-recipe blockwise needs a GPU of compute capability 9.0 or higher, this one has "
            f"{card}: use tensorwise"
        )
    if recipe == "blockwise" and cuda and _version(cuda) < (12, 9):
        return (
            f"--fp8-recipe blockwise needs CUDA 12.9 or newer, torch was built for {cuda}: use "
            "tensorwise, or install a newer torch"
        )
    return None


def _check_sizes(draft: Draft, config: dict[str, Any], recipe: str) -> None:
    """FP8 matmuls take rows of 16 entries, with mxfp8 of 32."""
    unit = 32 if recipe == "mxfp8" else 16
    for key, cut in _CUT_BY.items():
        size, ranks = config.get(key), draft[cut] if cut else 1
        if isinstance(size, int) and size % (unit * (ranks or 1)):
            over = f" over {option_of(cut)} {ranks}" if cut and ranks and ranks > 1 else ""
            raise ConfigError(
                f"--fp8-format: {key} {size} of the model{over} is not a multiple of {unit}, which FP8 "
                "matmuls need: remove it"
            )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
