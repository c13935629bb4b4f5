"""Waiting for a server to come up: it answers, it ends, it falls silent, or its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from slime.utils.engine_keys import forget_keys, remember_key
from slime.utils.sync_http import HttpError, get_json

_START_TIMEOUT_S = 3600.0  # reading hundreds of gigabytes from a slow disk, and capturing graphs
_SILENT_TIMEOUT_S = 600.0  # a server that is getting anywhere writes a line now and then
_POLL_S = 0.5


class StartError(Exception):
    """Why a server did not come up, in a few words."""


def wait_until_ready(
    url: str,
    *,
    label: str,
    log_path: Path,
    ended: Callable[[], int | None],
    owns_port: Callable[[int], bool],
    key: str | None,
    start_timeout_s: float = _START_TIMEOUT_S,
    silent_timeout_s: float = _SILENT_TIMEOUT_S,
) -> None:
    """Return once the server we started answers.

    The key goes only to a process of ours: another one may have taken the port before it. `label` is the
    version of the weights the server must report.
    """
    forget_keys([url])  # of an earlier server at this port
    started = time.monotonic()
    while not _answers(url, label, owns_port, key):
        status = ended()
        if status is not None:
            raise StartError(f"ended with status {status}")
        if time.monotonic() - started > start_timeout_s:
            raise StartError(f"was not up after {start_timeout_s:.0f} s")
        silent_s = time.time() - log_path.stat().st_mtime
        if min(silent_s, time.monotonic() - started) > silent_timeout_s:
            raise StartError(f"has written nothing for {silent_timeout_s:.0f} s")
        time.sleep(_POLL_S)


def _answers(url: str, label: str, owns_port: Callable[[int], bool], key: str | None) -> bool:
    try:
        get_json(f"{url}/health_generate", timeout=30, retries=0)
        if not owns_port(urlsplit(url).port or 80):
            raise StartError(f"found port {url} already in use by another server")
        remember_key([url], key)
        found = get_json(f"{url}/model_info", timeout=10, retries=0)["weight_version"]
    except (HttpError, KeyError, TypeError):
        return False
    if found != label:
        raise StartError(f"found port {url} already in use by another server")
    return True
