"""Rules about FP8, the precision of the optimizer's tensors, and kernels of installed packages.

--attention-backend auto, local   slime's packed attention (kernels of torch)
--attention-backend flash         the package flash-attn through TransformerEngine if both are
                                  installed, else slime's packed attention
--attention-backend fused         cuDNN's, through TransformerEngine
--attention-backend unfused       TransformerEngine's matmuls and softmax
"""

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
_SPLIT_BY = {
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
    """Refuse FP8 that the GPU, CUDA or the model's sizes do not support; `config` is config.json."""
    if not draft["fp8_format"]:
        for flag in draft.given_flags():
            value = draft[flag.name]
            if flag.name.startswith("fp8_") and value is not None and value is not False:
                raise ConfigError(
                    f"{flag.option} has no effect without FP8: add --fp8-format hybrid, or remove "
                    f"{flag.option}"
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
    """Return why a GPU cannot compute in this recipe, None if it can or is unknown."""
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
    """Check that rows have a multiple of 16 entries, with mxfp8 of 32, as FP8 matmuls need."""
    unit = 32 if recipe == "mxfp8" else 16
    for key, axis in _SPLIT_BY.items():
        size, ranks = config.get(key), draft[axis] if axis else 1
        if isinstance(size, int) and size % (unit * (ranks or 1)):
            over = f" over {option_of(axis)} {ranks}" if axis and ranks and ranks > 1 else ""
            raise ConfigError(
                f"--fp8-format: {key} {size} of the model{over} is not a multiple of {unit}, which FP8 "
                "matmuls need: remove it"
            )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


TE_ATTENTION = ("fused", "unfused")
_APEX_KERNEL = "fused_weight_gradient_mlp_cuda"
FUSIONS = ("moe_permute_fusion", "moe_router_fusion")
_OF_MEGATRONS_LOSS = ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
_REPLAYS = ("use_routing_replay", "use_rollout_routing_replay")


def check_kernels(draft: Draft) -> None:
    check_attention_backend(draft)
    check_fusions(draft)
    check_flex_dispatcher(draft)


def has_local_layers(draft: Draft) -> bool:
    """Return whether slime's own layers are built although TransformerEngine may be installed."""
    chosen = draft["transformer_impl"]
    return chosen == "local" or (chosen is None and draft["precision"] == "fp32")


def check_attention_backend(draft: Draft) -> None:
    backend, cp = draft["attention_backend"], draft["context_parallel_size"]
    if backend not in TE_ATTENTION:
        return
    option = f"--attention-backend {backend}"
    if not is_installed("transformer_engine"):
        draft.lacking(
            f"{option} is TransformerEngine's, which is not installed: remove it (slime's packed "
            "attention needs no package), or install transformer-engine"
        )
    if has_local_layers(draft):
        raise ConfigError(
            f"{option} is TransformerEngine's, and the layers are slime's own: add --transformer-impl "
            "transformer_engine, or remove it"
        )
    if backend == "fused" and draft["precision"] == "fp32":
        raise ConfigError(f"{option} computes in bf16: remove --fp32, or use unfused")
    if cp > 1:
        raise ConfigError(
            f"{option} with --context-parallel-size {cp}: only slime's packed attention splits packed "
            "samples over context ranks: remove --attention-backend"
        )


def check_fusions(draft: Draft) -> None:
    for name in FUSIONS:
        if draft.given(name) and draft[name] and not is_installed("transformer_engine"):
            draft.warn(
                f"{option_of(name)} has no effect without TransformerEngine, which is not installed: "
                "torch computes the same"
            )
    for name in _OF_MEGATRONS_LOSS:
        if draft.given(name) and draft[name] not in (None, False, "native"):
            draft.warn(
                f"{option_of(name)} has no effect: log-probs are computed in chunks from hidden states, "
                "without Megatron's loss"
            )
    te = is_installed("transformer_engine") and not has_local_layers(draft)
    if draft["gradient_accumulation_fusion"] and not te and not is_installed(_APEX_KERNEL):
        draft.lacking(
            "--gradient-accumulation-fusion needs a kernel of Apex, or TransformerEngine's layers: remove "
            "it, or install one of them"
        )
    if te and "layernorm" in (draft["recompute_modules"] or ()):
        draft.warn(
            "--recompute-modules layernorm reaches the norms before experts only: TransformerEngine fuses "
            "the others into linear layers"
        )
    replay = next((name for name in _REPLAYS if draft[name]), None)
    if replay and draft["moe_router_fusion"]:
        raise ConfigError(
            f"--moe-router-fusion chooses experts inside one kernel, which {option_of(replay)} cannot "
            "override: remove one"
        )


def check_flex_dispatcher(draft: Draft) -> None:
    """Check the flex MoE token dispatcher; both of its backends, DeepEP and HybridEP, are in package deep_ep."""
    dispatcher = draft["moe_token_dispatcher_type"]
    if dispatcher != "flex":
        if draft["moe_enable_deepep"]:
            raise ConfigError(
                f"--moe-token-dispatcher-type {dispatcher} does not use DeepEP: remove --moe-enable-deepep, "
                "or use flex"
            )
        return
    option = "--moe-token-dispatcher-type flex"
    if draft["moe_enable_deepep"] and draft["moe_flex_dispatcher_backend"] == "hybridep":
        raise ConfigError(
            "--moe-enable-deepep and --moe-flex-dispatcher-backend hybridep name two backends of "
            f"{option}: remove one"
        )
    if not is_installed("deep_ep"):
        flag = "--moe-enable-deepep" if draft["moe_enable_deepep"] else option
        draft.lacking(
            f"{flag} needs the package deep_ep, which is not installed: install DeepEP, or use "
            "--moe-token-dispatcher-type alltoall without --moe-enable-deepep"
        )
    ep, etp = draft["expert_model_parallel_size"], draft["expert_tensor_parallel_size"]
    if ep * etp == 1:
        raise ConfigError(
            f"{option} moves tokens between expert-parallel ranks, and there is one: use alltoall, or "
            "raise --expert-model-parallel-size"
        )
    router = draft["moe_router_dtype"]
    if router not in (None, "fp32"):
        raise ConfigError(
            f"{option} takes probabilities in fp32: remove --moe-router-dtype {router}"
        )
    if draft["moe_shared_expert_overlap"]:
        raise ConfigError(f"--moe-shared-expert-overlap cannot overlap with {option}: use alltoall")
