"""Whether the fast forward serves a model on a device, and with whose kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from slime.engine.cache.kv_cache import KVCache
from slime.engine.kernels.cpu_kernels import SOURCE, CpuKernels
from slime.engine.kernels.interface import Kernels
from slime.engine.models.cpu_runner import CpuRunner
from slime.engine.models.fast_model import FastModel, why_not_fast
from slime.engine.scheduler.scheduler import Scheduler
from slime.utils.c_library import load_library

if TYPE_CHECKING:
    from slime.engine.models.cuda_runner import CudaRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fast:
    model: FastModel
    kernels: Kernels


def make_fast(model: PreTrainedModel, context_len: int) -> Fast | None:
    """None, with a logged sentence, where the model has to run as Hugging Face defines it."""
    reason = why_not_fast(model)
    kernels = None
    if reason is None:
        kernels, reason = _find_kernels(model.device, model.dtype)
    if kernels is None:
        logger.info("%s does not run on the fast forward: %s", type(model).__name__, reason)
        return None
    return Fast(model=FastModel(model, kernels, context_len), kernels=kernels)


def make_fast_runner(
    fast: Fast, cache: KVCache, scheduler: Scheduler, deterministic: bool
) -> CpuRunner | CudaRunner:
    if cache.device.type == "cuda":
        from slime.engine.models.cuda_runner import CudaRunner

        return CudaRunner(fast.model, fast.kernels, cache, scheduler, deterministic)
    assert isinstance(fast.kernels, CpuKernels)
    return CpuRunner(fast.model, fast.kernels, cache, scheduler, deterministic)


def _find_kernels(device: torch.device, dtype: torch.dtype) -> tuple[Kernels | None, str]:
    if device.type == "cuda":
        try:
            from slime.engine.kernels.cuda_kernels import CudaKernels
        except ImportError as error:
            return None, f"no Triton ({error})"
        return CudaKernels(), ""
    if dtype != torch.float32:
        return None, f"no kernels for {dtype} on a CPU"
    library = load_library(SOURCE)
    return (None, "no kernels were built") if library is None else (CpuKernels(library), "")
