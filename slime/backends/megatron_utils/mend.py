"""Places of megatron-core 0.16.1 that fail where TransformerEngine is not installed."""

from __future__ import annotations


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
