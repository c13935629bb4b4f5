"""Which parameters are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.hf_weights.local import current_layout, local_weights
from slime.backends.megatron_utils.hf_weights.rules import WeightMap
from slime.backends.trained_names import is_trained, refuse_nothing_trained
from slime.utils.device import current_device

if TYPE_CHECKING:
    from slime.config.arguments import Args


def freeze(args: Args, chunks: Sequence[torch.nn.Module], weights: WeightMap) -> None:
    """Take gradients away as --only-train-params-name-list and --freeze-params-name-list say.

    They speak of Hugging Face names; a fused parameter is trained if any of its parts is.
    """
    only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
    if only is None and not frozen:
        return
    params = {_place(param): param for chunk in chunks for param in chunk.parameters()}
    names: list[str] = []
    for weight in local_weights(chunks, weights, current_layout()):
        param = params.get(_place(weight.tensor))
        if param is not None:
            names += weight.match.hf_names
            param.requires_grad_(any(is_trained(n, only, frozen) for n in weight.match.hf_names))
    count = torch.tensor(sum(p.requires_grad for p in params.values()), device=current_device())
    dist.all_reduce(count)
    if not count:
        refuse_nothing_trained(names)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where it lies; also on the meta device, which has no addresses."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset()
