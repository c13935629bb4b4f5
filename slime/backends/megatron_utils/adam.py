"""AdamW with the step count per parameter group, and FusedAdam's state in checkpoints.

Megatron's optimizers expect the step count per group. torch's AdamW counts steps per parameter, and
a distributed optimizer's checkpoint then cannot be loaded under another layout.

With --use-precision-aware-optimizer TransformerEngine's FusedAdam holds the main parameters. For a
bf16 parameter it stores only the lower 16 bits (--store-param-remainders), which are useless
without the parameter. megatron-core 0.16.1 would save those 16 bits as the main parameter, and fail
to load them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from slime.backends.megatron_utils.model_config import has_te
from slime.utils.device import device_type

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
_MAIN = "master_param"


class GroupStepAdamW(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: object,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, group)

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        step = torch.tensor(float(group["step"]), device=params[0].device)
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage] - torch's own AdamW calls it
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def install_adam() -> None:
    """Make megatron use GroupStepAdamW, unless TransformerEngine's FusedAdam and a GPU are available."""
    if has_te() and device_type() == "cuda":
        install_fused_state()
        return
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True


@functools.cache
def install_fused_state() -> None:
    """Patch megatron's distributed optimizer to use `fused_state` and `set_fused_state`."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    get = DistributedOptimizer._get_main_param_and_optimizer_states
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def states(self: DistributedOptimizer, model_param: torch.Tensor) -> dict[str, Any]:
        if _is_fused(self):
            return fused_state(*_adam_and_shard(self, model_param))
        return get(self, model_param)

    def set_states(
        self: DistributedOptimizer, model_param: torch.Tensor, tensors: dict[str, Any]
    ) -> None:
        if _is_fused(self):
            set_fused_state(*_adam_and_shard(self, model_param), tensors)
        else:
            put(self, model_param, tensors)

    DistributedOptimizer._get_main_param_and_optimizer_states = states
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


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

    FusedAdam rounds half up. If another optimizer rounded half down, 0x8000 becomes 0x7fff: an
    error of one bit in fp32.
    """
    upper = param.detach().view(torch.int16).to(torch.int32) << 16
    return (main.view(torch.int32) - upper).clamp(-(2**15), 2**15 - 1).to(torch.int16)


def _is_fused(optimizer: DistributedOptimizer) -> bool:
    config = optimizer.config
    return (
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and not config.optimizer_cpu_offload
    )


def _adam_and_shard(
    optimizer: DistributedOptimizer, model_param: torch.Tensor
) -> tuple[Any, torch.Tensor]:
    """Return FusedAdam and the shard of a parameter that this rank updates."""
    group, place = optimizer.model_param_group_index_map[model_param]
    return optimizer.optimizer, optimizer.optimizer.param_groups[group]["params"][place]


def _has_remainder(adam: Any, param: torch.Tensor) -> bool:
    return adam.store_param_remainders and param.dtype == torch.bfloat16
