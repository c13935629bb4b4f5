"""What the processes of a run import: driver, rollout manager, trainer, engine; see tests/fork_server.py.

Not Ray, whose library reads a worker's variables when it is loaded.
"""

from __future__ import annotations

import sys

from slime.utils.gc_tuning import collector_off

with collector_off():
    import slime.engine.server.__main__  # isort: skip  # first: it sets a variable that torch reads
    import google.protobuf.internal.builder
    import numpy
    import psutil
    import requests
    import torch._dynamo
    import transformers.models.auto.tokenization_auto

    import slime.backends.fsdp_utils.actor
    import slime.cli.loop
    import slime.data.tokenizer
    import slime.rollout.data_source
    import slime.rollout.metrics
    import slime.rollout.rm_hub
    import slime.rollout.sglang_rollout
    import slime.rollout.train_data

__all__ = ["google", "psutil", "requests", "slime", "torch", "transformers"]
assert "ray" not in sys.modules


def forget_random_state() -> None:
    """Seed numpy's generator anew: processes that are forked from one have the same state."""
    numpy.random.seed()
