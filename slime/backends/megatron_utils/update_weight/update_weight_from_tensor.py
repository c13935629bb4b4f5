"""Weight updates to engines on the trainer's own devices."""

from __future__ import annotations

from slime.backends.megatron_utils.update_weight.update_weight_from_distributed import UpdateWeight


class UpdateWeightFromTensor(UpdateWeight):
    """Share tensors by CUDA IPC or shared memory with engines on the same devices."""

    transport = "tensor"
