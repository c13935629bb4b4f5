"""AdamW with the step count per parameter group, as megatron's optimizers expect it.

torch's AdamW counts steps per parameter, and a distributed optimizer's checkpoint then cannot be
loaded under another layout. TransformerEngine's FusedAdam counts them per group, like this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slime.backends.megatron_utils.fused_adam import install_fused_state
from slime.backends.megatron_utils.model_config import has_te
from slime.utils.device import device_type


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
    """Make megatron use it, unless TransformerEngine's FusedAdam and a GPU are available."""
    if has_te() and device_type() == "cuda":
        install_fused_state()
        return
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
