"""Engines that are killed or frozen at every moment of a run: they come back, and no sample is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from slime.backends.sglang_utils.command import Node, server_command
from slime.config.installed import find_sglang
from slime.serving.servers import ServerProcess
from slime.utils.addresses import find_ports, says_port_taken
from tests.args import make_args
from tests.e2e import runs

pytestmark = pytest.mark.timeout(1800)  # several starts of a server, on cores that may be busy
SHARED = {"colocate": True, "rollout_num_gpus": None}
SLOW = {"rollout_max_response_len": 160, "max_tokens_per_gpu": 2048}  # seconds of generation


def pid(run_dir: Path, engine: int) -> int:
    return json.loads((run_dir / "logs" / f"engine_{engine}.port").read_text())["pid"]


def synced(run_dir: Path) -> int:
    """Updates that are done; the next rollout is being generated then."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind":"perf"') if path.exists() else 0


def updates(run_dir: Path) -> int:
    """How many were begun."""
    return (run_dir / "logs" / "engine_0.log").read_text().count("POST /begin_weight_update")


def check(run_dir: Path, rollouts: int) -> None:
    trained = runs.metrics(run_dir, "train")
    assert [record["rollout_id"] for record in trained] == list(range(rollouts))
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    generated = runs.metrics(run_dir, "rollout")
    assert all(record["rollout/samples"] == 16 for record in generated)


def finish(process, status: int = 0) -> str:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == status, output
    return output


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "colocated"])
def test_one_engine_of_two_is_killed_in_generation_and_the_other_frozen(
    model, data, tmp_path, shares
):
    """By way of the router, which takes what was under way to the engine that is left."""
    run_dir = tmp_path / "run"
    places = {**SHARED, "actor_num_gpus_per_node": 2} if shares else {"rollout_num_gpus": 2}
    words = runs.command(
        model,
        data,
        run_dir,
        rollout_engine="sglang",
        num_rollout=5,
        rollout_health_check_interval=2,
        rollout_health_check_timeout=20,
        **SLOW,
        **places,
    )
    process = runs.start(words)
    runs.wait_for(lambda: synced(run_dir) == 1, process, timeout=600)
    time.sleep(1)
    os.kill(first := pid(run_dir, 0), signal.SIGKILL)
    runs.wait_for(lambda: pid(run_dir, 0) != first, process, timeout=600)
    before = synced(run_dir)
    runs.wait_for(lambda: synced(run_dir) > before, process, timeout=600)
    time.sleep(1)
    os.kill(pid(run_dir, 1), signal.SIGSTOP)
    output = finish(process)
    for engine in (0, 1):
        assert f"engine {engine} failed and was started again" in output
    assert (run_dir / "logs" / "router.log").exists()
    check(run_dir, 5)


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "colocated"])
def test_the_engine_is_killed_while_idle_and_in_an_update_and_frozen_in_another(
    model, data, tmp_path, shares
):
    run_dir = tmp_path / "run"
    words = runs.command(
        model,
        data,
        run_dir,
        rollout_engine="sglang",
        num_rollout=5,
        rollout_health_check_interval=5,
        rollout_health_check_timeout=20,
        update_weight_buffer_size=1024,  # a bucket per tensor: the update takes a while
        rollout_data_postprocess_path="tests.sglang.hooks.slow_step",
        **(SHARED if shares else {}),
    )
    process = runs.start(words)
    runs.wait_for(lambda: (run_dir / "training_1").exists(), process, timeout=600)
    os.kill(first := pid(run_dir, 0), signal.SIGKILL)
    runs.wait_for(lambda: pid(run_dir, 0) != first, process, timeout=600)
    for rollout_id, how in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
        marked = run_dir / f"training_{rollout_id}"
        runs.wait_for(marked.exists, process, timeout=600)
        begun = updates(run_dir)
        runs.wait_for(lambda n=begun: updates(run_dir) > n, process, timeout=600)
        os.kill(pid(run_dir, 0), how)
    output = finish(process)
    assert output.count("engine 0 failed and was started again") == 3
    assert "no longer answers" in (run_dir / "logs" / "trainer_0.log").read_text()
    check(run_dir, 5)


def test_a_taken_port_is_what_the_server_says_it_is(model, tmp_path):
    install, ports = find_sglang(), find_ports("127.0.0.1")
    assert install is not None
    with socket.create_server(("127.0.0.1", ports.server)):
        command = server_command(
            make_args(rollout_engine="sglang", hf_checkpoint=str(model)),
            index=0,
            node=Node(host="127.0.0.1"),
            ports=ports,
            rendezvous_host="127.0.0.1",
            install=install,
            on_gpu=False,
            label="start",
        )
        process = ServerProcess(command, tmp_path / "log", {"SGLANG_USE_CPU_ENGINE": "1"})
        deadline = time.monotonic() + 400
        while process.status() is None:
            assert time.monotonic() < deadline
            time.sleep(0.5)
    process.stop()
    assert says_port_taken(process.last_lines(300)), process.last_lines(300)


def test_a_server_that_dies_at_its_start_ends_the_run_in_its_own_words(model, data, tmp_path):
    words = runs.command(
        model,
        data,
        tmp_path / "run",
        rollout_engine="sglang",
        sglang_tokenizer_path=str(tmp_path / "nothing"),
    )
    status, output = runs.run(words, timeout=600)
    assert status == 1, output
    assert "slime: engine 0 ended with status" in output
    assert str(tmp_path / "run" / "logs" / "engine_0.log") in output
    assert str(tmp_path / "nothing") in output.split("engine_0.log ends with")[1], output
