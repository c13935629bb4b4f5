"""Process groups: the trainer's default group, and groups of a trainer rank with engines."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from slime.utils.addresses import choose_interface, own_host
from slime.utils.device import collective_backend, current_device, device_type

_DEFAULT_TIMEOUT = timedelta(minutes=10)


def init_side_group(
    init_method: str,
    rank: int,
    world_size: int,
    backend: str,
    group_name: str,
    *,
    store: Store | None = None,
    timeout: timedelta = _DEFAULT_TIMEOUT,
) -> dist.ProcessGroup:
    """Create a group of `world_size` processes with a rendezvous at `init_method` ("tcp://host:port").

    The keys in the store are those of SGLang, so that its servers can be members. Ranks are those
    inside the group: `dist.broadcast(tensor, group=group, group_src=0)`. Rank 0 passes the `store`
    it got from `serve_store`, or none to serve one at the port of `init_method`.
    """
    if store is None:
        store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    with _unbound_default_group():
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            PrefixStore(group_name, store),
            group_name=group_name,  # pyright: ignore[reportArgumentType]
            timeout=timeout,
        )
    assert isinstance(group, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def destroy_side_group(group: dist.ProcessGroup) -> None:
    dist.destroy_process_group(group)


def serve_store(host: str, world_size: int) -> tuple[TCPStore, str]:
    """Return a store for a new group, listening at a free port of `host` only, and its `init_method`."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"tcp://{host}:{port}"


@contextmanager
def _unbound_default_group() -> Iterator[None]:
    """Unbind the default group from its GPU inside the `with`.

    NCCL would otherwise create the new group by splitting the default one, which has other members.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    device = group.bound_device_id if group is not None else None
    if group is None or device is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


class Rendezvous:
    """Rank 0 calls `serve`, the other ranks `set_master` with its address, then all `join`."""

    def __init__(self, rank: int, world_size: int, master: tuple[str, int] | None = None) -> None:
        self._rank, self._world_size = rank, world_size
        self._master = master
        self._store: Store | None = None

    def serve(self) -> tuple[str, int]:
        """Start the store and return its address; its port is bound, so no other process can take it."""
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
            self._store = HashStore() if self._world_size == 1 else self._connect(timeout)
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

    def _connect(self, timeout: timedelta) -> Store:
        assert self._master is not None, "set_master comes before join"
        return TCPStore(*self._master, self._world_size, is_master=False, timeout=timeout)
