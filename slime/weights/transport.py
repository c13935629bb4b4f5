"""How buckets of weights reach engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from slime.core.errors import WeightSyncError as WeightSyncError
from slime.utils.sync_http import HttpError
from slime.weights.buckets import Bucket
from slime.weights.engine_client import EngineClient

PendingCall = tuple[EngineClient, Callable[[], None]]  # the second waits for the engine's reply


class WeightTransport(ABC):
    """Calls come in this order; `close` also comes after errors.

    open ─▶ (reclaim ─▶ allocate ─▶ send) for each bucket ─▶ finish ─▶ close
    """

    shares_device: bool  # whether a rank on an engine's own device serves it, instead of rank 0

    @abstractmethod
    def open(self, engines: list[EngineClient], version: int) -> None:
        """Prepare to send `version` to the engines this rank serves; there is at least one."""

    def reclaim(self) -> None:
        """Complete what `send` began and wait until the buffer of the next bucket is free.

        Transports that send without buffers have nothing to do.
        """
        return None

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return a buffer (uint8) of at least `nbytes` for the next bucket, or None.

        A bucket that is built there needs no copy to be sent. This only allocates: it sends nothing
        and waits for nobody. The contents may be read until the bucket after the next is built.
        """
        return None

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Send a bucket, possibly without waiting for the engines to have it.

        Its tensors may change after the return, except those in a buffer of the transport.
        """

    @abstractmethod
    def finish(self) -> None:
        """Return once every engine has every bucket."""

    @abstractmethod
    def close(self) -> None:
        """Release what one update needed; a second call has no effect."""


def wait_acknowledged(index: int, calls: list[PendingCall]) -> None:
    """Wait until every engine has taken bucket `index`; raise the errors of all that have not."""
    errors: list[WeightSyncError] = []
    for engine, finish in calls:
        try:
            with naming_bucket(index, engine):
                finish()
        except WeightSyncError as error:
            errors.append(error)
    if errors:
        raise WeightSyncError("; ".join(str(error) for error in errors)) from errors[0]


@contextmanager
def naming_bucket(index: int, engine: EngineClient) -> Iterator[None]:
    """Raise HTTP errors as a WeightSyncError that names bucket and engine."""
    try:
        yield
    except HttpError as error:
        text = f"bucket {index} did not arrive: engine {engine.url}: {error}"
        raise WeightSyncError(text) from error
