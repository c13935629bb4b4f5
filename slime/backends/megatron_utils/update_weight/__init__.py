"""Send the weights of a Megatron model in any layout to engines, from scripts that run the update.

    updater = UpdateWeightFromDistributed(args, model, lambda: model.state_dict(), "qwen3")
    updater.update_weights()

Every rank creates an updater and calls it. Tensors are gathered bucket by bucket over TP, EP and PP
under Hugging Face names; versions and checksums are compared after every update.
"""

from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import (
    UpdateWeightFromDistributed,
)
from slime.backends.megatron_utils.update_weight.update_weight_from_tensor import (
    UpdateWeightFromTensor,
)

__all__ = ["UpdateWeightFromDistributed", "UpdateWeightFromTensor"]
