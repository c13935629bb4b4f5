"""State of TransformerEngine's FusedAdam in checkpoints: main parameters and moments in fp32.

With --use-precision-aware-optimizer FusedAdam holds the main parameters. For a bf16 parameter it
stores only the lower 16 bits (--store-param-remainders), which are useless without the parameter.
megatron-core 0.16.1 would save those 16 bits as the main parameter, and fail to load them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_MAIN = "master_param"


def install_fused_state() -> None:
    """Patch megatron's distributed optimizer to use `fused_state` and `set_fused_state`."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if hasattr(DistributedOptimizer, "_slime_patched"):
        return
    get = DistributedOptimizer._get_main_param_and_optimizer_states
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def states(self: DistributedOptimizer, model_param: torch.Tensor) -> dict[str, Any]:
        return fused_state(*_own(self, model_param)) if _is_fused(self) else get(self, model_param)

    def set_states(
        self: DistributedOptimizer, model_param: torch.Tensor, tensors: dict[str, Any]
    ) -> None:
        if _is_fused(self):
            set_fused_state(*_own(self, model_param), tensors)
        else:
            put(self, model_param, tensors)

    DistributedOptimizer._get_main_param_and_optimizer_states = states
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    DistributedOptimizer._slime_patched = True  # type: ignore[attr-defined]


def fused_state(adam: Any, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return {"param", "exp_avg", "exp_avg_sq"}, the initial ones before the first update."""
    if not adam.state[param]:
        adam.initialize_state(param, _has_remainder(adam, param))
    state = {name: adam.get_unscaled_state(param, name) for name in adam.state[param]}
    main = state.pop(_MAIN)
    if param.dtype == torch.float32:  # updated in place; its copy is stale
        main = param
    elif _has_remainder(adam, param):
        main = main_param(param, main)
    return {"param": main, **state}


@torch.no_grad()
def set_fused_state(adam: Any, param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """Set the state that `fused_state` returned; `param` is already loaded."""
    for name, tensor in tensors.items():
        value = tensor.to(device=param.device, copy=True)  # scaled in place
        if name != "param":
            adam.set_scaled_state(param, name, value)
            continue
        if param.dtype == torch.float32:
            param.copy_(value)
        if _has_remainder(adam, param):
            value = remainder(param, value)
        adam.set_scaled_state(param, _MAIN, value)


def main_param(param: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Combine bf16 with the signed 16 bits below: 0x3f81 and -0x8000 are 0x3f808000."""
    bits = (param.detach().view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return bits.view(torch.float32)


def remainder(param: torch.Tensor, main: torch.Tensor) -> torch.Tensor:
    """Return the 16 bits of `main` below `param`, which is `main` rounded to bf16.

    FusedAdam rounds half up. Where another optimizer rounded half down, 0x8000 becomes 0x7fff: an
    error of one bit in fp32.
    """
    upper = param.detach().view(torch.int16).to(torch.int32) << 16
    return (main.view(torch.int32) - upper).clamp(-(2**15), 2**15 - 1).to(torch.int16)


def _is_fused(optimizer: DistributedOptimizer) -> bool:
    config = optimizer.config
    return (
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and not config.optimizer_cpu_offload
    )


def _own(optimizer: DistributedOptimizer, model_param: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return FusedAdam and the shard of a parameter that this rank updates."""
    group, place = optimizer.model_param_group_index_map[model_param]
    return optimizer.optimizer, optimizer.optimizer.param_groups[group]["params"][place]


def _has_remainder(adam: Any, param: torch.Tensor) -> bool:
    return adam.store_param_remainders and param.dtype == torch.bfloat16
