"""The server of `slime watch`: who gets an answer, and what it answers about a run folder."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import numpy as np
import psutil
import pytest

from slime.runlog.jsonl import append_lines
from tests.browser import Served, served
from tests.huge_run import write_huge_run
from tests.synthetic_run import write_run
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]


class Client:
    def __init__(self, server: Served) -> None:
        parts = urlsplit(server.url)
        assert parts.hostname and parts.port
        self.url, self.pid = server.url, server.pid
        self.address, self.prefix = (parts.hostname, parts.port), parts.path

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET"):
        """Return status, headers and body; `path` is below the key unless it begins with a slash."""
        connection = HTTPConnection(*self.address, timeout=30)
        target = path if path.startswith("/") else self.prefix + path
        connection.request(method, target, headers=headers or {})
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()

    def ask(self, name: str, **query: object):
        status, _, body = self.get(f"api/{name}?{urlencode(query)}")
        assert status == 200, body
        return json.loads(body)


@contextmanager
def client_of(*folders: Path) -> Iterator[Client]:
    with served(*folders) as server:
        yield Client(server)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("watch") / "run")


@pytest.fixture(scope="module")
def client(run_dir) -> Iterator[Client]:
    with client_of(run_dir) as found:
        yield found


# ---- who gets an answer


def test_it_listens_on_loopback_alone(client):
    assert client.address[0] == "127.0.0.1"
    process = psutil.Process(client.pid)
    assert {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"} == {"127.0.0.1"}
    assert len(client.prefix) > 30  # the key
    assert client.prefix.strip("/") not in " ".join(process.cmdline())


@pytest.mark.parametrize(
    "path", ["/", "/x/", "/api/runs", "/watch.css", "/x/api/runs", "//api/runs", "/%00/"]
)
def test_without_the_key_there_is_nothing(client, path):
    status, _, body = client.get(path)
    assert status == 404 and b"run" not in body.replace(b"slime watch printed", b"")


@pytest.mark.parametrize(
    "change", [lambda key: key[:-1], lambda key: key + "a", lambda key: key.swapcase()]
)
def test_a_wrong_key_is_no_key(client, change):
    key = change(client.prefix.strip("/"))
    assert client.get(f"/{key}/api/runs")[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "attacker.example"}, 403),  # DNS rebinding
        ({"Host": "127.0.0.1.attacker.example"}, 403),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_other_pages_get_no_answer(client, headers, status):
    assert client.get("api/runs", headers)[0] == status


def test_the_page_itself_may_ask(client):
    host = f"127.0.0.1:{client.address[1]}"
    assert client.get("api/runs", {"Host": host, "Origin": f"http://{host}"})[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(client, method):
    assert client.get("api/runs", method=method)[0] == 405


@pytest.mark.parametrize("path", ["", "app.js", "watch.css", "uPlot.js", "api/runs"])
def test_every_answer_has_the_policy(client, path):
    status, headers, body = client.get(path)
    assert status == 200 and body
    policy = headers["Content-Security-Policy"]
    assert (
        "default-src 'none'" in policy
        and "unsafe" not in policy
        and "frame-ancestors 'none'" in policy
    )
    assert (
        headers["X-Content-Type-Options"] == "nosniff"
        and headers["Referrer-Policy"] == "no-referrer"
    )


@pytest.mark.parametrize(
    "path", ["../watch.py", "%2e%2e/server.py", "..%2f..%2fserver.py", "server.py", "api/../x"]
)
def test_only_the_files_of_the_page_are_served(client, path):
    assert client.get(path)[0] == 404


def test_the_page_asks_no_other_server():
    for path in (ROOT / "slime" / "runlog" / "live" / "page").iterdir():
        text = path.read_text()
        assert not re.search(
            r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text
        ), path


# ---- what it answers


def test_a_series_is_the_values_of_the_file(client, run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    expected = [(r["rollout_id"], r["train/loss"]) for r in lines if "train/loss" in r]
    drawn = client.ask("series", run="run", names="train/loss,eval/addition/reward")
    assert list(zip(drawn["train/loss"]["x"], drawn["train/loss"]["y"], strict=True)) == expected
    assert drawn["eval/addition/reward"]["x"][0] == -1


@pytest.mark.parametrize(
    ("name", "query", "words"),
    [
        ("series", {"run": "other"}, "no such run"),
        ("samples", {"run": "run", "reward_min": "x"}, "must be a number"),
        ("samples", {"run": "run", "start": "x"}, "whole number"),
        ("sample", {"run": "run", "rollout_id": "1"}, "rollout_id and index"),
        ("sample", {"run": "run", "rollout_id": "1", "index": "999999999"}, "no such sample"),
        ("series", {"run": "run", "from": "1"}, "numbers"),
        ("configs", {"names": "{"}, "JSON"),
        ("groups", {"run": "run", "prompt": "zz"}, "hash"),
    ],
)
def test_a_wrong_question_gets_a_sentence(client, name, query, words):
    status, _, body = client.get(f"api/{name}?{urlencode(query)}")
    assert status == 400 and words in body.decode()


FILTERS = [
    ({"status": "truncated"}, lambda r: r["status"] == "truncated"),
    ({"reward_min": 0.5}, lambda r: r["reward"] >= 0.5),
    (
        {"reward_max": 0.5, "rollout_id_min": 50},
        lambda r: r["reward"] <= 0.5 and r["rollout_id"] >= 50,
    ),
    ({"advantage_max": -1}, lambda r: r["advantage"] <= -1),
    ({"response_len_min": 4}, lambda r: r["response_length"] >= 4),
    ({"text": "<b>"}, lambda r: "<b>" in r["response"]),
]


@pytest.mark.parametrize(("query", "kept"), FILTERS)
def test_filters_keep_what_the_files_say(client, run_dir, query, kept):
    """Against a plain loop over samples.jsonl, which has the texts of some samples."""
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    expected = [(r["rollout_id"], r["index"]) for r in lines if kept(r)]
    assert expected
    found, start = [], 0
    while True:
        page = client.ask("samples", run="run", kept=1, order="up", start=start, **query)
        found += [(row["rollout_id"], row["index"]) for row in page["rows"]]
        start += 50
        if start >= page["total"]:
            break
    assert found == expected and page["total"] == len(expected)


def test_groups_without_signal_are_those_with_equal_rewards(client, run_dir):
    page = client.ask("groups", run="run", signal="none", order="up")
    everything = client.ask("groups", run="run")
    assert everything["all"] == 60 * 16 and 0 < page["total"] < everything["all"]
    assert all(len(set(row["rewards"])) == 1 and len(row["rewards"]) == 8 for row in page["rows"])
    other = client.ask("groups", run="run", signal="some")
    assert page["total"] + other["total"] == everything["all"]


def test_samples_are_sorted_by_any_column(client):
    for name in ("reward", "response_len"):
        rows = client.ask("samples", run="run", sort=name, order="down")["rows"]
        values = [row[name] for row in rows]
        assert values == sorted(values, reverse=True)


# ---- a run that grows, and a huge one


def test_a_run_under_way_is_read_on(tmp_path):
    folder = write_run(tmp_path / "growing", rollouts=3, planned=9)
    with client_of(tmp_path) as client:
        (first,) = client.ask("runs")
        assert first["rollouts"] == 3
        new = {"rollout_id": 3, "kind": "train", "time": 2e9, "train/loss": 0.5}
        append_lines(folder / "metrics.jsonl", [new])
        wait_for(lambda: client.ask("runs")[0]["version"] > first["version"], timeout=10)
        assert client.ask("series", run="growing", names="train/loss")["train/loss"]["y"][-1] == 0.5
        write_run(tmp_path / "second", rollouts=1)
        wait_for(lambda: len(client.ask("runs")) == 2, timeout=15)


def test_ten_thousand_rollouts_and_a_million_samples_open_in_two_seconds(tmp_path):
    """In seconds of the server's own CPU, which other work on the machine does not change."""
    write_huge_run(tmp_path / "huge")
    with client_of(tmp_path) as client:
        process = psutil.Process(client.pid)

        def seconds() -> float:
            times = process.cpu_times()
            return times.user + times.system

        client.get("")
        before = seconds()
        overview = client.ask("overview", run="huge")
        client.ask("series", run="huge", names=",".join(overview["metrics"]))
        assert overview["rollouts"] == 10_000 and seconds() - before < 2
        before = seconds()
        page = client.ask("samples", run="huge", status="truncated", sort="reward", start=5000)
        assert page["all"] == 1_000_000 and len(page["rows"]) == 50
        client.ask("groups", run="huge", signal="none")
        client.ask("prompts", run="huge")
        client.ask("timeline", run="huge")
        client.ask("sample", run="huge", dataset="train", rollout_id=5000, index=500_003)
        assert seconds() - before < 3
        before = seconds()
        for _ in range(10):  # a page that is left open asks this every two seconds
            client.ask("runs")
        assert (seconds() - before) / 20 < 0.01


def test_a_port_that_is_taken_is_one_sentence(run_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "slime.cli", "watch", str(run_dir), "--port", port]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
        )
    assert done.returncode == 2 and done.stderr.startswith(f"slime: --port {port} cannot be used")


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_a_run_is_one_sentence(tmp_path, name):
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "slime.cli", "watch", str(tmp_path / name)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert (
        done.returncode != 0
        and "Traceback" not in done.stderr
        and str(tmp_path / name) in done.stderr
    )


def test_damaged_files_are_read_as_far_as_they_make_sense(tmp_path):
    folder = write_run(tmp_path / "run", rollouts=2)
    rng = np.random.default_rng(0)
    for name in (
        "metrics.jsonl",
        "samples.jsonl",
        "samples.table",
        "events.jsonl",
        "timeline.jsonl",
    ):
        with (folder / name).open("ab") as file:
            file.write(
                b'\n{"rollout_id": 1e999}\n[1]\n{"time": 1, "spans": [1, [1]], "engines": 3}\n'
            )
            file.write(rng.bytes(5000) + b"\n")
    (folder / "config_resolved.yaml").write_text("- a\n- [")
    (folder / "environment.json").write_text("[]")
    with client_of(folder) as client:
        for name in ("overview", "timeline", "samples", "groups", "prompts"):
            client.ask(name, run="run")
