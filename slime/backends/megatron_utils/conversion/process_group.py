"""The ranks of a conversion: those that torchrun started, or this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from slime.utils.device import collective_backend, device_type


@contextmanager
def process_group() -> Iterator[None]:
    if dist.is_torchelastic_launched():
        dist.init_process_group(collective_backend())
    else:
        dist.init_process_group(collective_backend(), store=dist.HashStore(), rank=0, world_size=1)
    if device_type() == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        yield
    finally:
        dist.destroy_process_group()
