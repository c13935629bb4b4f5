"""Emptying a server's cache, which succeeds only once the server is idle.

SGLang ends itself when its memory is released while anything is under way, so a flush goes first.
"""

from __future__ import annotations

import time

from slime.utils.sync_http import HttpError, post_json

_FLUSH_TIMEOUT_S = 60.0
_PAUSE_S = 0.05


def flush_until_idle(
    url: str,
    token: str | None,
    timeout_s: float = _FLUSH_TIMEOUT_S,
    *,
    answer_timeout_s: float = _FLUSH_TIMEOUT_S,
) -> None:
    """Flush as soon as the server is idle, within `timeout_s`; each answer, yes or no, comes at once
    from a server that works, so one that does not answer within `answer_timeout_s` hangs."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            post_json(f"{url}/flush_cache", {}, token=token, timeout=answer_timeout_s)
            return
        except HttpError as error:
            if error.status != 400 or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)
