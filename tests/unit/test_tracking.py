"""Metrics reach every place that keeps them, and survive crashes and resumes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slime.core.errors import ConfigError
from slime.runlog.jsonl import LogWrites, append_lines, read_lines
from slime.runlog.live.sample_store import SampleStore
from slime.runlog.tracking import METRICS_FILE, Tracker, cut_back, logged_rollouts
from tests.args import make_args

KEY = "0123456789abcdef0123456789abcdef01234567"  # of the form W&B asks for


def read(run_dir: Path) -> list[dict]:
    """Strict JSON: NaN and Infinity, which json accepts by default, are errors."""

    def refuse(name: str) -> float:
        raise ValueError(name)

    lines = (run_dir / METRICS_FILE).read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_lines_are_strict_json_and_complete_at_once(tmp_path: Path):
    tracker = Tracker(make_args(), tmp_path)
    values = {
        "train/loss": 0.1,
        "train/nan": float("nan"),
        "train/inf": float("-inf"),
        "rollout/tokens": np.int64(7),
        "rollout/reward_mean": np.float32(0.25),
        "train/grad_norm": torch.tensor(1.5),
    }
    tracker.log(values, rollout_id=3, kind="train")
    [record] = read(tmp_path)  # before close: nothing waits in a buffer
    assert record.pop("time") > 0
    assert record == {
        "rollout_id": 3,
        "kind": "train",
        "train/loss": 0.1,
        "train/nan": None,
        "train/inf": None,
        "rollout/tokens": 7,
        "rollout/reward_mean": 0.25,
        "train/grad_norm": 1.5,
    }
    tracker.close()


def test_floats_come_back_bit_for_bit(tmp_path: Path):
    value = float(np.nextafter(np.float64(0.1), 1))
    tracker = Tracker(make_args(), tmp_path)
    tracker.log({"train/loss": value}, rollout_id=0, kind="train")
    tracker.close()
    assert read(tmp_path)[0]["train/loss"] == value


def test_a_new_tracker_repairs_a_half_written_line(tmp_path: Path):
    whole = '{"rollout_id":0,"kind":"train","time":1.0}\n'
    (tmp_path / METRICS_FILE).write_text(whole + '{"rollout_id":1,"ki')
    tracker = Tracker(make_args(), tmp_path)
    tracker.log({"train/loss": 1.0}, rollout_id=1, kind="train")
    tracker.close()
    assert [record["rollout_id"] for record in read(tmp_path)] == [0, 1]


def test_cut_back_keeps_exactly_what_came_before(tmp_path: Path):
    metrics = [{"rollout_id": i, "kind": "train", "time": 1.0, "x": i} for i in range(-1, 6)]
    samples = [{"rollout_id": i, "prompt": "p"} for i in range(6)]
    append_lines(tmp_path / METRICS_FILE, metrics)
    append_lines(tmp_path / "samples.jsonl", samples)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"rollout_id": 2, "kind": "tr')  # torn, though its id alone would be kept
    dropped = cut_back(tmp_path, 4)
    assert list(read_lines(tmp_path / METRICS_FILE)) == metrics[:5]
    assert list(read_lines(tmp_path / "samples.jsonl")) == samples[:4]
    assert dropped == 2 + 1 + 2
    assert not list(tmp_path.glob(".*tmp"))
    [resume] = read_lines(tmp_path / "resumes.jsonl")
    assert resume["start_rollout_id"] == 4


@pytest.mark.parametrize("logged", [False, True])
def test_an_unfinished_evaluation_leaves_no_samples(tmp_path: Path, logged: bool):
    """The run is killed between the samples of an evaluation and its line of metrics."""
    metrics = [{"rollout_id": i, "kind": "train", "time": 1.0} for i in range(4)]
    metrics += [
        {"rollout_id": i, "kind": "eval", "time": 1.0} for i in ((1, 3) if logged else (1,))
    ]
    samples = [
        {"rollout_id": i, "kind": k, "prompt": "p"} for i in (1, 3) for k in ("train", "eval/a")
    ]
    append_lines(tmp_path / METRICS_FILE, metrics)
    append_lines(tmp_path / "samples.jsonl", samples)
    cut_back(tmp_path, 4)
    assert list(read_lines(tmp_path / "samples.jsonl")) == (samples if logged else samples[:3])


_FULL_DISK = """
import resource, sys
from pathlib import Path
from slime.core.types import Sample
from slime.runlog.jsonl import append_lines
from slime.runlog.sample_log import SampleLog
from slime.runlog.tracking import Tracker
from tests.args import make_args

folder = Path(sys.argv[1])
tracker = Tracker(make_args(use_tensorboard=True), folder)
samples = SampleLog(folder, limit=1, decode=lambda ids: ["x"] * len(ids))

def track(number):
    tracker.log({"train/loss": 0.5}, rollout_id=number, kind="train")

def sample(number):
    fields = {"prompt": f"{number}+1=", "tokens": [1, 2], "response_length": 1, "group_index": 0}
    rows = [Sample(index=index, **fields) for index in range(3)]
    samples.log_scored(number, rows, [1.0] * 3)

def append(number):
    append_lines(folder / "lines.jsonl", [{"rollout_id": number, "text": "p" * 40}])

for name, write in (
    ("metrics.jsonl", track), ("samples.jsonl", sample), ("samples.table", sample), ("lines.jsonl", append)
):
    for number in range(10):
        if number == 4:  # a part of the next line still fits
            size = (folder / name).stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))
        if number == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        try:
            write(number)
            print(name, number)
        except OSError as error:
            assert error.filename.endswith(name), error
tracker.close()
"""


def test_a_full_disk_costs_a_run_neither_its_training_nor_its_records(tmp_path: Path):
    """The file system takes 20 more bytes, refuses twice, and has room again."""
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )

    def told(name: str) -> list[int]:
        return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith(name)]

    for name in (METRICS_FILE, "samples.jsonl", "samples.table"):
        assert told(name) == list(range(10))
    assert told("lines.jsonl") == [0, 1, 2, 3, 6, 7, 8, 9]
    for name, written in (
        (METRICS_FILE, told(METRICS_FILE)),
        ("samples.jsonl", [*range(10), *range(10)]),
        ("lines.jsonl", told("lines.jsonl")),
    ):
        assert [record["rollout_id"] for record in read_lines(tmp_path / name)] == written
        assert (tmp_path / name).read_bytes().count(b"\n") == len(written)
    store = SampleStore(tmp_path)
    store.update()
    assert store.rows["rollout_id"].tolist() == [n for n in [*range(10)] * 2 for _ in range(3)]
    kept = np.flatnonzero(store.rows["text"] >= 0).tolist()
    assert len(kept) == 20 and all(store.text(row) is not None for row in kept)
    assert {json.loads(line)["text"] for line in (tmp_path / "prompts.jsonl").open()} == {
        f"{number}+1=" for number in range(10)
    }
    for warning in ("metrics cannot be written yet", "samples cannot be written yet"):
        assert done.stderr.count(warning) == 1
    assert done.stderr.count("TensorBoard's files are not written any more") == 1


def test_what_waits_is_required_before_a_resume_would_count_on_it():
    full, written = [True], []

    def write() -> None:
        if full:
            raise OSError(errno.ENOSPC, "full")
        written.append(1)

    writes = LogWrites("not yet: %s")
    writes.add(write)
    with pytest.raises(OSError, match="full"):
        writes.require()
    full.clear()
    writes.require()
    writes.require()
    assert written == [1]


def test_cut_back_of_a_new_run_does_nothing(tmp_path: Path):
    assert cut_back(tmp_path, 0) == 0
    assert list(tmp_path.iterdir()) == []


def test_logged_rollouts_are_those_of_the_kind(tmp_path: Path):
    tracker = Tracker(make_args(), tmp_path)
    tracker.log({"eval/a/reward": 0.1}, rollout_id=-1, kind="eval")
    tracker.log({"train/loss": 0.1}, rollout_id=0, kind="train")
    tracker.close()
    assert logged_rollouts(tmp_path, "eval") == {-1}
    assert logged_rollouts(tmp_path / "nowhere", "eval") == set()


def test_tensorboard_holds_the_same_numbers_after_a_resume(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    args = make_args(use_tensorboard=True, tb_experiment_name="mine")
    for start, value in ((0, 1.0), (2, 10.0)):  # the second start repeats rollout 2
        cut_back(tmp_path, start)
        tracker = Tracker(args, tmp_path)
        for rollout_id in range(start, 3):
            tracker.log({"train/loss": value + rollout_id}, rollout_id=rollout_id, kind="train")
        tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "mine"))
    events.Reload()
    seen = {event.step: event.value for event in events.Scalars("train/loss")}
    assert seen == {0: 1.0, 1: 2.0, 2: 12.0}


def test_wandb_offline_keeps_the_run_and_never_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(sys, "argv", ["train.py", "--use-wandb", "--wandb-key", KEY])
    args = make_args(use_wandb=True, wandb_mode="offline", wandb_key=KEY, wandb_group="g")
    tracker = Tracker(args, tmp_path)
    tracker.log({"train/loss": 0.5, "train/nan": float("nan")}, rollout_id=0, kind="train")
    tracker.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert (tmp_path / "wandb_run_id.txt").read_text().strip()
    holding = [p for p in tmp_path.rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]
    assert holding == []


_TRACK = """
import sys
from pathlib import Path
from slime.runlog.tracking import Tracker
from tests.args import make_args

# Nothing listens there: an online run could not start.
args = make_args(use_wandb=True, wandb_host="http://127.0.0.1:9", wandb_key=sys.argv[2])
tracker = Tracker(args, Path(sys.argv[1]))
tracker.log({"train/loss": 0.5}, rollout_id=0, kind="train")
tracker.close()
"""


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_without_a_flag_wandb_takes_its_mode_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    """In a process of its own: wandb reads the environment once."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", mode)
    command = [sys.executable, "-c", _TRACK, str(tmp_path), "not of the form W&B asks for"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == (mode == "offline")


@pytest.mark.parametrize(
    ("flag", "module", "package"),
    [
        ("use_wandb", "wandb", "wandb"),
        ("use_tensorboard", "torch.utils.tensorboard", "tensorboard"),
    ],
)
def test_a_missing_package_is_one_sentence_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, module: str, package: str
):
    args = make_args(**{flag: True})
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail as if not installed
    with pytest.raises(ConfigError) as caught:
        Tracker(args, tmp_path)
    assert f"--{flag.replace('_', '-')}" in str(caught.value)
    assert f"pip install '{package}" in str(caught.value)
