"""--distributed-timeout-minutes is the deadline of every group the trainers make."""

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime.weights.process_group import Rendezvous
from tests.args import make_args
from tests.forked import run_forked
from tests.tiny import make_tiny_checkpoint

MINUTES = 47  # more than torch's own for any backend


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_every_group_of_the_trainer(backend, model, tmp_path):
    run_forked(_trainer, 1, backend, str(model), str(tmp_path / "found"))
    found = pickle.loads((tmp_path / "found").read_bytes())
    assert len(found) >= 2  # on a CPU, groups of the same ranks are one
    assert set(found) == {timedelta(minutes=MINUTES)}


def test_the_group_with_the_engines(tmp_path):
    run_forked(_side_group, 1, str(tmp_path / "found"))
    assert pickle.loads((tmp_path / "found").read_bytes()) == [timedelta(minutes=MINUTES)]


def _trainer(_: int, backend: str, model: str, file: str) -> None:
    torch.set_num_threads(1)
    flags = {"train_backend": backend, "hf_checkpoint": model, "rollout_num_gpus": 1}
    args = make_args(**flags, distributed_timeout_minutes=MINUTES)
    if backend == "fsdp":
        from slime.backends.fsdp_utils.actor import FSDPTrainRayActor as Actor
    else:
        from slime.backends.megatron_utils.actor import MegatronTrainRayActor as Actor
    Actor(args, 0, 1).init(args, "actor")
    Path(file).write_bytes(pickle.dumps(_timeouts()))


def _side_group(_: int, file: str) -> None:
    from slime.weights.sync import _make_transport

    args = make_args(update_weight_transport="distributed", distributed_timeout_minutes=MINUTES)
    transport = _make_transport(args)
    transport.open([], 1)  # pyright: ignore[reportAttributeAccessIssue]
    Path(file).write_bytes(pickle.dumps(_timeouts()))


def _timeouts() -> list[timedelta]:
    """Of every group of this process, by what its backend was made with."""
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_a_rank_that_is_alone_waits_no_longer_than_the_deadline():
    rendezvous = Rendezvous(1, 2, ("127.0.0.1", 1))  # nobody listens there
    with pytest.raises(dist.DistError):
        rendezvous.join(timedelta(seconds=1))
