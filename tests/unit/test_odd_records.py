"""Records of a run hold whatever rows, models, hooks and file names bring; they never end the run."""

from __future__ import annotations

import errno
import os
import resource
import signal

import numpy as np
import orjson
import pytest

from slime.core.types import Sample, Status
from slime.runlog.event_log import EVENTS_FILE, EventLog
from slime.runlog.jsonl import append_lines, read_lines
from slime.runlog.live.run_view import RunView
from slime.runlog.live.sample_detail import sample_detail
from slime.runlog.sample_log import SampleLog

LONE = "\ud800 \udcff"
DEEP = orjson.loads(b"[" * 1000 + b"]" * 1000)  # what a row of JSON may hold

ODD = {
    "prompt": {"prompt": LONE},
    "messages as a prompt": {"prompt": [{"role": "user", "content": LONE}]},
    "deep prompt": {"prompt": [{"role": "user", "content": DEEP}]},
    "response": {"response": LONE},
    "label": {"label": LONE},
    "deep label": {"label": DEEP},
    "rendered prompt": {"metadata": {"rendered_prompt": LONE}},
    "error": {"status": Status.FAILED, "metadata": {"error": LONE, "error_stage": DEEP}},
    "message": {"metadata": {"messages": [{"role": LONE, "content": DEEP}, 7, {"role": DEEP}]}},
    "calls": {"metadata": {"messages": [{"role": "a", "tool_calls": [{"function": "x"}, {"function": [1]}, 3]}]}},
    "arguments": {"metadata": {"messages": [{"tool_calls": [{"function": {"name": DEEP, "arguments": DEEP}}]}]}},
    "numpy rewards": {"reward": {"score": np.float32(0.5), "more": np.int64(2)}},
    "huge rewards": {"reward": {"score": 10**30}},
    "rewards by number": {"reward": {1: 2.0}},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_odd_samples_are_logged(tmp_path, odd):
    fields = {"index": 0, "group_index": 0, "prompt": "1+1=", "tokens": [5, 9, 5], "response": "2",
              "response_length": 1, "loss_mask": [1], "rollout_log_probs": [-0.1], "weight_versions": [1],
              "reward": 1.0, "status": Status.COMPLETED}  # fmt: skip
    log = SampleLog(tmp_path, limit=8, decode=lambda ids: [LONE] * len(ids))
    log.log_scored(0, [Sample(**{**fields, **odd})], [0.5])  # type: ignore[arg-type]
    (tmp_path / "metrics.jsonl").write_text("")
    view = RunView(tmp_path, "run")
    view.samples.update()
    found = sample_detail(view, "train", 0, 0)
    assert found is not None and found["kept"] and orjson.dumps(found, lambda a: a.tolist())


def test_odd_events_are_logged(tmp_path):
    EventLog(tmp_path).event("note", LONE, count=np.int64(3), path=LONE, huge=10**30)
    (record,) = read_lines(tmp_path / EVENTS_FILE)
    assert record["count"] == 3 and record["text"] == "? ?"


def test_a_killed_append_and_a_full_disk_leave_whole_lines(tmp_path):
    """A write that ends in the middle, at every byte, and one that the disk has no room for."""
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"n": 0}])
    whole, line = path.read_bytes(), b'{"n": 1}\n'
    for cut in range(len(line)):
        path.write_bytes(whole + line[:cut])
        append_lines(path, [{"n": 2}])
        assert list(read_lines(path)) == [{"n": 0}, {"n": 2}]
    path.write_bytes(whole)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 4, before[1]))
        with pytest.raises(OSError) as error:
            append_lines(path, [{"n": 3}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert error.value.errno == errno.EFBIG and path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
