"""`slime watch` on run folders of others: hostile, endless and broken files cost one sentence, and no other run."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import orjson
import pytest
from safetensors.numpy import save_file

from slime.runlog.jsonl import LineTail, append_lines, read_lines
from slime.runlog.live.sample_query import QueryError
from slime.runlog.live.server import ANSWERS, Runs, encoded
from slime.runlog.sample_log import append_samples, read_thumbnails
from slime.runlog.sample_table import SAMPLE_DTYPE, read_table
from slime.runlog.token_log import read_tokens
from tests.synthetic_run import make_row

METRICS = [{"rollout_id": n, "kind": "train", "time": 1e9 + n, "train/loss": 0.5} for n in range(3)]
DEEP = b"[" * 600 + b"]" * 600


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    append_lines(folder / "metrics.jsonl", METRICS)
    append_samples(folder, 0, [make_row(response="r")])
    return folder


def ask(runs: Runs, name: str, run: str, **query: str):
    """Return an answer as the page gets it, or the sentence that it gets instead."""
    try:
        return orjson.loads(encoded(ANSWERS[name], runs, {"run": run, **query}))
    except QueryError as error:
        return str(error)


def ask_all(folder: Path, run: str) -> dict:
    runs = Runs([folder])
    sample = {"dataset": "train", "rollout_id": "0", "index": "0"}
    asked = {name: ask(runs, name, run) for name in ANSWERS if name not in ("sample", "configs")}
    asked["sample"] = ask(runs, "sample", run, **sample)
    asked["configs"] = ask(runs, "configs", run, names=json.dumps([run]))
    return asked


def resolved(text: str) -> dict[str, bytes]:
    return {"config_resolved.yaml": text.encode()}


def line(**values) -> bytes:
    return json.dumps(values).encode() + b"\n"


HOSTILE = {
    "deep yaml": resolved("[" * 100_000),
    "num_rollout of text": resolved("num_rollout: {value: many}"),
    "num_rollout huge": resolved(f"num_rollout: {{value: 1{'0' * 40}}}"),
    "layout of lists": resolved(
        "actor_num_nodes: {value: [x]}\nactor_num_gpus_per_node: {value: 9999999999999}\n"
        "rollout_num_gpus: {value: 1}\ncolocate: {value: 1}\ntrain_backend: {value: x}\n"
        "rollout_engine: {value: x}"
    ),
    "binary value": resolved("a: {value: !!binary aGk=}\nb: {value: !!set {a, b}}"),
    "deep event": {"events.jsonl": b'{"time": 1, "kind": "note", "x": ' + DEEP + b"}\n"},
    "events of odd types": {
        "events.jsonl": line(time=True, kind=[], text={}) + line(time=1e300, kind="end", text=[1])
    },
    "weights of odd types": {
        "events.jsonl": line(time=1, kind="weights", version=2, engines=[[], {}])
    },
    "timeline of odd types": {
        "timeline.jsonl": line(process=[], spans=[[1, "x", None], ["a", [], {}]], memory=[])
        + line(process="p", spans=[["a", 1.0, 2.0]], memory={"rss": {"a": []}})
    },
    "deep environment": {"environment.json": b'{"starts": ' + b"[" * 100_000},
    "deep header": {"samples.table.json": b"[" * 100_000},
    "huge vocabulary id": {"tokens/vocabulary.jsonl": line(**{"9" * 5000: "x"})},
    "odd metrics": {"metrics.jsonl": line(rollout_id=1, kind="x", time=1, a=[1, [2]], b="x" * 9)},
}


@pytest.mark.parametrize("files", HOSTILE.values(), ids=HOSTILE.keys())
def test_one_hostile_run_does_not_spoil_the_others(tmp_path, files):
    make_run(tmp_path / "good")
    before = ask_all(tmp_path, "good")
    hostile = make_run(tmp_path / "hostile")
    (hostile / "tokens").mkdir()
    for name, content in files.items():
        (hostile / name).write_bytes(content)
    answers = ask_all(tmp_path, "hostile")
    assert {run["name"] for run in answers["runs"]} == {"good", "hostile"}
    after = ask_all(tmp_path, "good")
    assert after.pop("runs") != before.pop("runs") and after == before


def test_a_folder_name_that_is_no_unicode(tmp_path):
    make_run(tmp_path / "good")
    os.rename(make_run(tmp_path / "odd"), os.fsencode(tmp_path) + b"/\xff\xfe")
    assert len(ask(Runs([tmp_path]), "runs", "")) == 2


def test_pipes_and_devices_do_not_block(tmp_path):
    make_run(tmp_path / "good")
    for name in ("metrics.jsonl", "events.jsonl", "samples.table", "samples.jsonl", "prompts.jsonl",
                 "timeline.jsonl", "environment.json", "config_resolved.yaml", "samples.table.json"):  # fmt: skip
        hostile = make_run(tmp_path / "hostile" / name)
        (hostile / name).unlink(missing_ok=True)
        os.mkfifo(hostile / name)
        (hostile / "tokens").mkdir()
        os.mkfifo(hostile / "tokens" / "rollout_0000000.safetensors")
        started = time.monotonic()
        ask_all(tmp_path, f"hostile/{name}")
        assert time.monotonic() - started < 5


def test_an_endless_line_is_read_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 20)  # zeros without a newline
        file.seek(0, os.SEEK_END)
        file.write(b'tail}\n{"a": 1}\n')
    tail = LineTail(path)
    read = [tail.read(limit=1 << 16) for _ in range(20)]
    assert [text for lines in read for _, text in lines] == [b'{"a": 1}\n']
    assert [place for lines in read for place, _ in lines] == [(1 << 20) + 6]


def test_lines_of_a_gigabyte_do_not_fill_the_memory(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"a": 1}\n')
    with path.open("r+b") as file:
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"a": 2}\n')
    tracemalloc.start()
    found = list(read_lines(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [{"a": 1}, {"a": 2}] and peak < 1 << 28


def test_a_huge_table_is_not_read_whole(tmp_path):
    path = tmp_path / "samples.table"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # 13 billion records in a sparse file
    assert len(read_table(tmp_path)) * SAMPLE_DTYPE.itemsize <= 2 << 30


COLUMNS = {
    "sample_index": np.array([0]), "num_tokens": np.array([2]), "position": np.arange(2, dtype=np.int32),
    "token_ids": np.arange(2, dtype=np.int32), "loss_mask": np.ones(2, np.int8),
    "rollout_log_probs": np.zeros(2, np.float32), "weight_versions": np.zeros(2, np.int32),
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": np.array([np.nan])},
        {"num_tokens": np.array([-5])},
        {"num_tokens": np.array([1 << 60])},
        {"num_tokens": np.zeros((0,), np.int64)},
        {"sample_index": np.zeros((1, 1, 1))},
        {"position": np.zeros((2, 2), np.int32)},
        {"token_ids": np.zeros((2, 50), np.int32)},
        {"token_ids": np.zeros(2, np.float32)},
        {"loss_mask": None},
        {"rollout_log_probs": np.zeros(1, np.float32)},
    ],
    ids=str,
)
@pytest.mark.parametrize("suffix", ["", ".trainer"])
def test_odd_tokens_are_no_tokens(tmp_path, change, suffix):
    run = make_run(tmp_path / "run")
    (run / "tokens").mkdir()
    good = {name: column for name, column in COLUMNS.items() if name != "x"}
    save_file(good, run / "tokens" / "rollout_0000000.safetensors")
    if suffix:
        good = {"trainer_log_probs": np.zeros(2, np.float32), **good}
    bad = {name: column for name, column in (good | change).items() if column is not None}
    save_file(bad, run / "tokens" / f"rollout_0000000{suffix}.safetensors")
    answer = ask(Runs([run]), "sample", "run", rollout_id="0", index="0")
    assert isinstance(answer, dict) and answer["response"] == "r"


def test_a_huge_token_file_is_not_read_whole(tmp_path):
    """A sparse file of eight gigabytes, whose header is right."""
    count = 1 << 30
    head = {
        "sample_index": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "num_tokens": {"dtype": "I64", "shape": [1], "data_offsets": [8, 16]},
        "position": {"dtype": "I64", "shape": [count], "data_offsets": [16, 16 + 8 * count]},
    }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "tokens").mkdir()
    with (tmp_path / "tokens" / "rollout_0000000.safetensors").open("wb") as file:
        numbers = np.array([0, count]).tobytes()
        file.write(len(text).to_bytes(8, "little") + text + numbers)
        file.truncate(8 + len(text) + 16 + 8 * count)
    assert read_tokens(tmp_path, "rollout_0000000", 0) is None


def test_thumbnails_are_few_and_small(tmp_path):
    (tmp_path / "images").mkdir()
    key = "a" * 64
    (tmp_path / "images" / f"{key}.png").write_bytes(b"x" * 1000)
    assert len(read_thumbnails(tmp_path, [key] * 10_000)) <= 64
    (tmp_path / "images" / f"{'b' * 64}.png").write_bytes(b"x" * (4 << 20))
    os.mkfifo(tmp_path / "images" / f"{'c' * 64}.png")
    assert read_thumbnails(tmp_path, ["b" * 64, "c" * 64, "../x", ["a"], None]) == []


def test_a_million_samples_of_one_group_are_a_page(tmp_path):
    run = make_run(tmp_path / "run")
    rows = np.zeros(1_000_000, SAMPLE_DTYPE)
    rows["text"] = -1
    (run / "samples.table").write_bytes(rows.tobytes())
    runs, started = Runs([run]), time.monotonic()
    assert ask(runs, "groups", "run")["rows"][0]["size"] == 1_000_000
    assert time.monotonic() - started < 3


def test_names_without_end_are_not_all_listed(tmp_path):
    run = make_run(tmp_path / "run")
    record = {**METRICS[0], **{f"m{n}": 1 for n in range(200_000)}}
    append_lines(run / "metrics.jsonl", [record])
    (brief,) = ask(Runs([run]), "runs", "run")
    assert "train/loss" in brief["metrics"] and len(brief["metrics"]) <= 10_000
