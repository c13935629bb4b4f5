"""Tensors as SGLang's /update_weights_from_tensor takes them: pickled handles of shared memory.

Between processes of one machine only the handle travels: a CUDA IPC handle, or on a CPU the name of a
shared-memory file. All tensors of a bucket are views of one buffer, so it is one handle per bucket.
"""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # its reductions of tensors

from slime.core.errors import UserError


def tensor_update(
    named: list[tuple[str, torch.Tensor]], *, num_ranks: int, version: int
) -> dict[str, Any]:
    """The body of the request; the tensors must stay as they are until it is answered.

    Each rank of the engine opens a handle of its own: CUDA handles are counted.
    """
    return {
        "serialized_named_tensors": [_serialize(named) for _ in range(num_ranks)],
        "load_format": None,
        "flush_cache": False,
        "weight_version": str(version),
    }


def _serialize(named: list[tuple[str, torch.Tensor]]) -> str:
    _name_gpus_by_uuid(named[0][1].is_cuda)
    buffer = io.BytesIO()
    with _shared_by_name():
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()


def _name_gpus_by_uuid(on_gpu: bool) -> None:
    """The engine may number the GPUs differently; SGLang has the means to say which one is meant."""
    if not on_gpu:
        return
    try:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    except ImportError as error:
        if torch.cuda.device_count() == 1:
            return
        raise UserError(
            "--update-weight-transport tensor with several GPUs per process needs sglang in the "
            "trainer's environment too: install it there"
        ) from error
    monkey_patch_torch_reductions()


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """A file descriptor, torch's usual handle on a CPU, can be passed to a child process only."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
