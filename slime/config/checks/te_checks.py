"""Rules about flags that choose kernels of TransformerEngine, FlashAttention or DeepEP.

--attention-backend auto, local   slime's packed attention (torch's FlashAttention on a GPU)
--attention-backend flash         the package flash-attn through TransformerEngine where both are
                                  installed, else slime's packed attention
--attention-backend fused         cuDNN's, through TransformerEngine
--attention-backend unfused       TransformerEngine's matmuls and softmax
"""

from __future__ import annotations

from slime.config.flags.draft import Draft
from slime.config.flags.spec import option_of
from slime.config.installed import is_installed
from slime.core.errors import ConfigError

TE_ATTENTION = ("fused", "unfused")
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
            "attention runs torch's FlashAttention), or install transformer-engine"
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
    """DeepEP and HybridEP are one package, which moves tokens between GPUs."""
    if draft["moe_token_dispatcher_type"] != "flex":
        return
    option = "--moe-token-dispatcher-type flex"
    if draft["moe_enable_deepep"] and draft["moe_flex_dispatcher_backend"] == "hybridep":
        raise ConfigError(
            "--moe-enable-deepep and --moe-flex-dispatcher-backend hybridep name two backends of "
            f"{option}: remove one"
        )
    if not is_installed("deep_ep"):
        asked = "--moe-enable-deepep" if draft["moe_enable_deepep"] else option
        draft.lacking(
            f"{asked} needs the package deep_ep, which is not installed: install DeepEP, or use "
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
