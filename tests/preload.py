"""What every trainer and engine imports; the server of tests/forked.py imports it once for all of them."""

from __future__ import annotations

from slime.utils.gc_tuning import collector_off

with collector_off():
    import slime.engine.server.__main__  # isort: skip  # first: it sets a variable that torch reads
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.multiprocessing
    import transformers.modeling_utils

    import slime.backends.base

__all__ = ["slime", "torch", "transformers"]
