"""A process dies whose objects others were to read: the error of the others names it."""

import os
import signal
import time

import pytest
import ray

from slime.diagnosis.stall import PhaseDeadline
from slime.ray.remote import Remote
from slime.ray.watch import LostError, Member, StallError, Watch
from tests.args import make_args


class Maker:
    def make(self) -> list[ray.ObjectRef]:
        return [ray.put(b"rows" * 100_000)]


class Reader:
    def read(self, references: list[ray.ObjectRef]) -> int:
        return len(ray.get(references[0]))


@pytest.fixture
def local_ray():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_the_owner_of_lost_rows_is_named(local_ray, tmp_path):
    maker = Remote({"num_cpus": 0}, lambda: Maker)
    reader = Remote({"num_cpus": 0}, lambda: Reader)
    members = [
        Member(label="rollout manager", remote=maker),
        Member(label="trainer rank 0", remote=reader, rank=0),
    ]
    args = make_args(run_dir=str(tmp_path))
    watch = Watch(args, PhaseDeadline(args), print)
    watch.add(lambda: members)
    rows = maker.get(lambda maker: maker.make(), timeout=240)
    place = maker.place(timeout=240)
    assert place is not None
    os.kill(place.pid, signal.SIGKILL)
    deadline = time.monotonic() + 180
    with pytest.raises(LostError, match=rf"^rollout manager \(pid {place.pid} on \S+\) died: "):
        while time.monotonic() < deadline:  # the rows stay readable until Ray has seen the death
            watch.get([reader.call(lambda reader: reader.read(rows))], members[1:])


def test_a_stall_is_described_even_if_its_file_cannot_be_written(local_ray, tmp_path):
    args = make_args(run_dir=str(tmp_path / "removed"))
    deadline = PhaseDeadline(args)
    deadline.limits = {"train": 0.0, "log_probs": 60.0}
    watch = Watch(args, deadline, print)
    with deadline.enter("train"), pytest.raises(StallError, match=r"(?s)^train has .*stall\.txt: "):
        watch.check()
