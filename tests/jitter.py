"""Random delays in the test process, which bring tests that race with threads or event loops to light.

    python -m pytest -p tests.jitter tests/integration
    JITTER_SEED=3 JITTER_SCALE=2 python -m pytest -p tests.jitter ...       others, and more of them

Every step of an event loop, every start of a thread and every end of a sleep may be late: mostly by
nothing, in one of ten cases by up to 20 ms, in one of fifty by up to 150 ms. What fails so and passes
without is a race, of the test or of what it tests.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_SHORT_S, _LONG_S = 0.02, 0.15
_scale = float(os.environ.get("JITTER_SCALE", "1"))
_random = random.Random(int(os.environ.get("JITTER_SEED", "0")))
_sleep = time.sleep


def pytest_configure() -> None:
    _delay(asyncio.BaseEventLoop, "_run_once", before=True)
    _delay(threading.Thread, "run", before=True)
    _delay(threading.Thread, "start", before=False)
    _delay(time, "sleep", before=False)
    sys.setswitchinterval(_random.choice([1e-5, 1e-3, 5e-3, 5e-2]))


def _delay(owner: Any, name: str, *, before: bool) -> None:
    call: Callable[..., Any] = getattr(owner, name)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        if before:
            _pause()
            return call(*args, **kwargs)
        result = call(*args, **kwargs)
        _pause()
        return result

    setattr(owner, name, delayed)


def _pause() -> None:
    draw = _random.random()
    if draw < 0.02 * _scale:
        _sleep(_random.random() * _LONG_S)
    elif draw < 0.12 * _scale:
        _sleep(_random.random() * _SHORT_S)
