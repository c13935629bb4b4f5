"""Python's garbage collector in a process that takes apart very many replies."""

from __future__ import annotations

import gc
from functools import cache


@cache
def calm_garbage_collector() -> None:
    """Replies are made of very many small lists, none of them in a cycle. Without this the collector walks
    through them, and through every module and tokenizer loaded so far, again and again, which costs more
    than all the rest: 1.6 ms per sample of a rollout of 10,000 in place of 0.6."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
