"""Python's garbage collector kept out of the way of imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """For imports of torch and transformers: a million objects that all stay, walked again and again by
    collections that find nothing; an eighth of the time. Afterwards they are never walked again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
