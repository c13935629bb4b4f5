"""Settings of Python's garbage collector where it costs more than it frees."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the garbage collector inside the `with` and freeze the objects created there.

    Imports of torch and transformers create a million permanent objects; collections that traverse
    them without finding anything take an eighth of the time. Frozen objects are never traversed again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@cache
def raise_gc_thresholds() -> None:
    """Collect rarely from now on, and never again traverse what exists already.

    Engine replies are parsed into very many small lists without cycles. With the default thresholds the
    collector traverses them, and every loaded module and tokenizer, again and again: 1.6 ms per sample of
    a rollout of 10,000 instead of 0.6.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
