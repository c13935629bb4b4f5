"""Ranks that know only what the driver passes on form one group."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from slime.weights.process_group import Rendezvous
from tests.forked import start_forked


def _rank(rank: int, driver: Connection) -> None:
    rendezvous = Rendezvous(rank, 2)
    if rank == 0:
        driver.send(rendezvous.serve())
    rendezvous.set_master(*driver.recv())
    rendezvous.join(timedelta(seconds=300))
    value = torch.tensor([float(10**rank)])
    dist.all_reduce(value)
    driver.send(value.item())
    driver.recv()  # until the other has its answer too
    dist.destroy_process_group()


def test_ranks_meet_at_the_address_rank_0_serves():
    pipes = [Pipe() for _ in range(2)]
    ranks = [start_forked(_rank, rank, pipes[rank][1]) for rank in range(2)]
    ours = [pipe[0] for pipe in pipes]
    address = ours[0].recv()
    assert address[0] == "127.0.0.1"
    for end in ours:
        end.send(address)
    assert [end.recv() for end in ours] == [11.0, 11.0]
    for end in ours:
        end.send("done")
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
