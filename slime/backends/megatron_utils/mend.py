"""Places of megatron-core 0.16.1 that fail without TransformerEngine, or leave something behind."""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import threading
import time
from multiprocessing.managers import SyncManager
from queue import Queue


def mend_megatron() -> None:
    """Once per process, before a model is built; harmless where nothing is broken."""
    import megatron.core.utils as utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    if not hasattr(moe_utils, "te_general_gemm"):  # unbound
        moe_utils.te_general_gemm = None
    if utils.get_te_version() is None:  # is_te_min_version compares it with a version
        utils.get_te_version = lambda: Version("0.0.0")
    _mend_recomputation()
    _mend_checkpoint_queue()


def _mend_recomputation() -> None:
    """It takes "no fp8", which is its default, for fp8."""
    from megatron.core.tensor_parallel import random

    original = random.CheckpointWithoutOutput.__init__
    if hasattr(original, "mended"):
        return

    def init(self: random.CheckpointWithoutOutput, fp8: object = None) -> None:
        original(self, fp8=fp8 or None)

    init.mended = True  # type: ignore[attr-defined]
    random.CheckpointWithoutOutput.__init__ = init


def _mend_checkpoint_queue() -> None:
    """The process that holds the results of writers outlives a rank that is killed."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._get_write_results_queue = _results_queue


@functools.cache
def _results_queue() -> Queue:
    manager = SyncManager(ctx=mp.get_context("spawn"))
    manager.start(initializer=_end_with, initargs=(os.getpid(),))
    return manager.Queue()


def _end_with(parent: int) -> None:
    """Not by the kernel's signal, which comes when the thread ends that started this process."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
