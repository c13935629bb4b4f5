"""Patches of megatron-core 0.16.1: crashes without TransformerEngine, unpickling, leftovers."""

from __future__ import annotations

import functools
import os
import pickle
from io import BytesIO
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

from slime.backends.checkpoint_reader import DataReader, load_object
from slime.utils.machine import memory_file

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem


@functools.cache
def patch_megatron() -> None:
    """Apply all patches, before a model is built; further calls do nothing."""
    import megatron.core.utils as utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    if not hasattr(moe_utils, "te_general_gemm"):  # bound only if TransformerEngine is installed
        moe_utils.te_general_gemm = None
    if utils.get_te_version() is None:  # is_te_min_version compares it to a version
        utils.get_te_version = lambda: Version("0.0.0")
    _patch_recomputation()
    _patch_expert_state()
    _patch_host_optimizer()
    _patch_buckets()
    patch_checkpoints()


def patch_checkpoints() -> None:
    """Make megatron-core read checkpoints without unpickling, and collect results of writers without a process.

    Unpatched, it unpickles `.metadata` and stored objects.
    """
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async, torch

    torch._get_filesystem_reader = _data_reader
    torch.FileSystemReader = DataReader
    torch.MCoreLoadPlanner.load_bytes = _load_bytes
    common.TorchCommonLoadStrategy.load_common = _load_common
    filesystem_async._get_write_results_queue = _results_queue


def _data_reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> DataReader:
    return DataReader(checkpoint_dir)


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: BytesIO) -> None:
    """Do the same as torch's planner, but load with `weights_only=True`."""
    from torch.distributed.checkpoint._traverse import set_element

    name = read_item.dest_index.fqn
    loaded = load_object(value, f"the checkpoint's object {name}")
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def _load_common(self: object, checkpoint_dir: str | Path) -> Any:
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

    if not (Path(checkpoint_dir) / "trainer.json").exists():
        return {}  # of another tool: pickled objects, and no weights
    file = Path(checkpoint_dir) / COMMON_STATE_FNAME
    return load_object(file, file, map_location="cpu")


def _patch_recomputation() -> None:
    """Patch CheckpointWithoutOutput, which treats its default `fp8=False` as fp8."""
    from megatron.core.tensor_parallel import random

    original = random.CheckpointWithoutOutput.__init__

    def init(self: random.CheckpointWithoutOutput, fp8: Any = None) -> None:
        # It compares with None, although the annotation is bool.
        original(self, fp8=fp8 or None)  # pyright: ignore[reportArgumentType]

    random.CheckpointWithoutOutput.__init__ = init


def _patch_host_optimizer() -> None:
    """Patch HybridDeviceOptimizer, which looks for the fp32 copy of parameters that are fp32 already.

    Adapters are: their copy in host memory, if any, is what the optimizer updates.
    """
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    def load_masters(self: Any) -> None:
        for param, state in self.state.items() if self.param_update_in_fp32 else ():
            self.param_to_inner_param[param].data.copy_(state["master_param"])

    def copy_params(self: Any) -> None:
        for param, inner in self.param_to_inner_param.items():
            inner.data.copy_(param)

    HybridDeviceOptimizer._update_fp32_params_by_new_state = load_masters
    HybridDeviceOptimizer.update_fp32_param_by_new_param = copy_params


def _patch_expert_state() -> None:
    """Replace the pickled `_extra_state` of grouped experts, which is not saved, by empty tensors.

    megatron-core unpickles it in order to split it, and fails if TransformerEngine left it empty:
    with every FP8 recipe but delayed scaling.
    """
    from megatron.core.extensions import transformer_engine

    def split(self: Any, state: torch.Tensor) -> list[torch.Tensor]:
        return [state.new_empty(0)] * self.num_gemms

    if transformer_engine.TEGroupedLinear is not None:
        transformer_engine.TEGroupedLinear._split_extra_state = split


def _patch_buckets() -> None:
    """Count the padding after each bucket of gradients as part of the bucket.

    megatron-core saves the optimizer state of a buffer without the padding between its buckets, but
    slices it by positions with padding. Where a bucket ends at an odd number of elements, as with the
    small parameters of gated delta nets, the weights after it would be saved shifted.
    """
    from megatron.core.distributed import param_and_grad_buffer

    original = param_and_grad_buffer._ParamAndGradBuffer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.numel_unpadded = self.numel
        for bucket in self.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()

    param_and_grad_buffer._ParamAndGradBuffer.__init__ = init


@functools.cache
def _results_queue() -> _Results:
    return _Results()


class _Results:
    """Queue of what forked writers return, in memory that they share with the rank.

    megatron-core's is a process of its own, which imports torch and outlives a rank that is killed.
    """

    def __init__(self) -> None:
        self._file = memory_file("slime-checkpoint")
        self._read = 0  # bytes

    def put(self, result: object) -> None:
        os.pwrite(self._file, pickle.dumps(result), os.fstat(self._file).st_size)

    def get_nowait(self) -> Any:
        size = os.fstat(self._file).st_size
        stored = BytesIO(os.pread(self._file, size - self._read, self._read))
        self._read = size
        try:
            result = pickle.load(stored)
        except (EOFError, pickle.UnpicklingError):  # none, or a writer was killed
            raise Empty from None
        self._read -= len(stored.read())
        if self._read == size:
            os.ftruncate(self._file, 0)
            self._read = 0
        return result
