"""How long a call of an update may take, and whether its engine is there at all meanwhile.

An engine may be busy with a bucket for long, and then answers nothing that its scheduler must be asked; the
process that speaks HTTP tells /model_info all the same, unless it is frozen or gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from slime.utils.sync_http import HttpError, get_json

_LEAST_S = 60.0
_SLOWEST_BYTES_PER_S = 16 * 2**20

Result = TypeVar("Result")


@dataclass(kw_only=True, frozen=True)
class Patience:
    """After `look_every_s` without an answer the server is asked for its name, and has `answer_s`."""

    look_every_s: float = 30.0
    answer_s: float = 30.0


def allowed_s(nbytes: int) -> float:
    """For a call that moves so much: 512 MiB may take 92 s."""
    return _LEAST_S + nbytes / _SLOWEST_BYTES_PER_S


def require_alive(url: str, patience: Patience) -> None:
    """Raises unless the server at `url` still says what it serves."""
    try:
        get_json(f"{url}/model_info", timeout=patience.answer_s, retries=0)
    except HttpError as error:
        raise HttpError(f"it does not answer any more: {error}") from error


def in_background(call: Callable[[], Result]) -> Future[Result]:
    """On a daemon thread: what never returns must not keep the process from ending."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weight-sync-call").start()
    return future
