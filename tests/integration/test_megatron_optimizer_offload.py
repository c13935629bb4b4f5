"""Adapters with `--optimizer-cpu-offload`: megatron-core's optimizer in host memory, without a GPU.

Where megatron-core's class copies parameters to the host, all but the copies claim to be on a GPU.
tests/gpu/test_megatron_lora_cuda.py does it with a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.fsdp import Case
from tests.megatron import DIST_OPT, EP, megatron_args, my_rows, start_actor, whole_adapters
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

LORA = {"lora_rank": 4, "lora_merge_for_rollout": True, "micro_batch_size": 3}
OFFLOAD = {**DIST_OPT, "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
TARGETS = {"qwen3": ["all-linear"], "qwen3_moe": ["q_proj", "experts"]}


@contextmanager
def as_if_on_a_gpu() -> Iterator[list[torch.Tensor]]:
    """Yield the list of tensors that were copied to pinned memory."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from slime.backends.megatron_utils import optimizer
    from slime.backends.megatron_utils.cpu import InterceptTorch

    pinned: list[torch.Tensor] = []
    original = HybridDeviceOptimizer._init_sub_optimizers

    def handle(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is torch.Tensor.pin_memory:
            pinned.append(args[0].clone())
            return pinned[-1]
        if func == torch.Tensor.is_cuda.__get__:
            return all(args[0].data_ptr() != copy.data_ptr() for copy in pinned)
        return func(*args, **kwargs)

    def copy_to_host(self: HybridDeviceOptimizer) -> None:
        with InterceptTorch(handle):
            original(self)

    copies = mock.patch.object(HybridDeviceOptimizer, "_init_sub_optimizers", copy_to_host)
    with copies, mock.patch.object(optimizer, "_fields_on_cpu", lambda fields: fields):
        yield pinned


def _train(rank: int, case: Case, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    plain = start_actor(megatron_args(case, 2, layout, DIST_OPT), rank, 2)
    for rollout_id in range(2):
        plain.train(rollout_id, my_rows(plain, rollout_id))
    args = megatron_args(case, 2, layout, OFFLOAD)
    with as_if_on_a_gpu() as pinned:
        actor = start_actor(args, rank, 2)
        actor.train(0, my_rows(actor, 0))
        if rank == 0:
            Path(folder).mkdir()
        torch.distributed.barrier()
        actor.save_to(folder, 0)
        actor.train(1, my_rows(actor, 1))
        resumed = start_actor(args, rank, 2, checkpoint=folder)
        resumed.train(1, my_rows(resumed, 1))
    kinds = [type(part.optimizer).__name__ for part in actor.optimizer.inner.chained_optimizers]
    return {
        "kinds": set(kinds),
        "pinned": len(pinned),
        "adapters": [whole_adapters(one) for one in (plain, actor, resumed)],
    }


@pytest.mark.parametrize("family, layout", [("qwen3", {}), ("qwen3_moe", EP)])
def test_adapters_learn_the_same_bit_for_bit_and_resume(tmp_path: Path, family: str, layout):
    model = make_tiny_checkpoint(tmp_path / "model", family, weight_scale=3.0)
    case = Case(model=str(model), flags={**LORA, "lora_target_modules": TARGETS[family]})
    for found in run_megatron_ranks(_train, 2, case, layout, str(tmp_path / "saved")):
        assert found["kinds"] == {"HybridDeviceOptimizer"} and found["pinned"] > 0
        plain, offloaded, resumed = found["adapters"]
        assert plain.keys() == offloaded.keys() == resumed.keys()
        for name, expected in plain.items():
            assert torch.equal(offloaded[name], expected), name
            assert torch.equal(resumed[name], expected), name
