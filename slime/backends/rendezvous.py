"""Rendezvous of a trainer's ranks: a TCP store, then the default process group."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from slime.utils.addresses import choose_interface, own_host
from slime.utils.device import collective_backend, current_device, device_type
from slime.weights.process_group import serve_store


class Rendezvous:
    """Rank 0 calls `serve`, the other ranks `set_master` with its address, then all `join`."""

    def __init__(self, rank: int, world_size: int, master: tuple[str, int] | None = None) -> None:
        self._rank, self._world_size = rank, world_size
        self._master = master
        self._store: dist.Store | None = None

    def serve(self) -> tuple[str, int]:
        """Start the store and return its address; its port is bound, so no one else can take it."""
        host = own_host()
        self._store, init_method = serve_store(host, self._world_size)
        return host, int(init_method.rsplit(":", 1)[1])

    def set_master(self, address: str, port: int) -> None:
        self._master = (address, port)

    def join(self, timeout: timedelta) -> None:
        """Initialize the default process group, unless it already exists."""
        if dist.is_initialized():
            return
        choose_interface()
        if self._store is None:
            self._store = dist.HashStore() if self._world_size == 1 else self._connect(timeout)
        cuda = device_type() == "cuda"
        dist.init_process_group(
            # Collectives on CPU tensors need gloo: objects, offloaded gradients, checkpoints.
            f"cpu:gloo,cuda:{collective_backend()}" if cuda else collective_backend(),
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
            device_id=current_device() if cuda else None,
        )

    def _connect(self, timeout: timedelta) -> dist.Store:
        assert self._master is not None, "set_master comes before join"
        return dist.TCPStore(*self._master, self._world_size, is_master=False, timeout=timeout)
