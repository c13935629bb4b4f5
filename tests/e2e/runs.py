"""Whole runs of train.py at tiny size, for tests: start one, kill one, read what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests import fork_server

ROOT = Path(__file__).resolve().parents[2]
# What a clock measured, or where it ran, differs between two runs of the same training.
_NOT_LEARNING = ("perf/", "time")


def command(model: Path, data: Path, run_dir: Path, **overrides: object) -> list[str]:
    """A command line of train.py: GRPO on 2 prompts x 4 samples; keywords override or add flags."""
    flags: dict[str, object] = {
        "train_backend": "fsdp",
        "hf_checkpoint": model,
        "prompt_data": data,
        "label_key": "label",
        "custom_rm_path": "tests.e2e.rewards.dense",
        "run_dir": run_dir,
        "num_rollout": 3,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "global_batch_size": 16,
        "rollout_max_response_len": 8,
        "rollout_shuffle": True,
        "lr": 1e-3,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 128,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 1,
        **overrides,
    }
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return words


def _python_path() -> str:
    """The checkout first, then where the packages of this process may come from."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(*, forks: bool = False) -> dict[str, str]:
    """Return the environment of a driver; with `forks` its own processes are saved their imports."""
    found = {**os.environ, "PYTHONPATH": _python_path(), "OMP_NUM_THREADS": "1"}
    if forks and not _uses_other_hardware():
        found |= fork_server.for_children(found["PYTHONPATH"])
    return found


def start(
    words: list[str], script: str = "train.py", *, forked: bool = True
) -> subprocess.Popen[str]:
    """The script in a process group of its own, so that a test can end all of it.

    `forked` saves the processes of the run their imports (tests/fork_server.py).
    """
    forked = forked and not _uses_other_hardware()
    python = fork_server.client() if forked else sys.executable
    return subprocess.Popen(
        [python, str(ROOT / script), *words],
        cwd=ROOT,
        env={**environment(), **(fork_server.variables() if forked else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _uses_other_hardware() -> bool:
    """A GPU, or the real SGLang: what they read at their import was not looked into."""
    return Path("/dev/nvidiactl").exists() or "SLIME_SGLANG_PYTHON" in os.environ


def run(
    words: list[str], timeout: float = 300, script: str = "train.py", *, forked: bool = True
) -> tuple[int, str]:
    """Exit status and everything printed. A test about processes is one without `forked`."""
    process = start(words, script, forked=forked)
    output = finish(process, timeout)
    return process.returncode, output


def finish(process: subprocess.Popen[str], timeout: float = 300) -> str:
    """Everything it printed, once it has ended by itself."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        output = _end(process)
        raise AssertionError(f"still running after {timeout} s; it printed\n{output}") from None


def metrics(run_dir: Path, kind: str | None = None) -> list[dict]:
    """Of a run under way or over: a line that is being written is left out."""
    *lines, _ = (run_dir / "metrics.jsonl").read_text().split("\n")
    return [r for r in map(json.loads, lines) if kind is None or r["kind"] == kind]


def learning(run_dir: Path) -> dict[tuple[int, str], dict[str, float]]:
    """Every number that describes learning, by rollout and kind; times left out."""
    return {
        (record["rollout_id"], record["kind"]): {
            name: value for name, value in record.items() if not name.startswith(_NOT_LEARNING)
        }
        for record in metrics(run_dir)
        if record["kind"] in ("rollout", "train", "eval")
    }


def wait_for(condition, process: subprocess.Popen[str], timeout: float = 200) -> None:
    """Until `condition()`; fails with what the process printed should it end first."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"the run ended first; it printed\n{process.communicate()[0]}")
        if time.monotonic() > deadline:
            raise AssertionError(f"waited for {timeout} s; the run printed\n{_end(process)}")
        time.sleep(0.05)


def engine_facts(run_dir: Path, engine: int = 0) -> dict:
    """The port and the process of an engine that is up."""
    return json.loads((run_dir / "logs" / f"engine_{engine}.port").read_text())


def wait_until_gone(process: psutil.Process, timeout: float = 60) -> None:
    """One that nobody has buried yet counts as gone; another one that has its number since does not count."""
    deadline = time.monotonic() + timeout
    while _runs(process):
        assert time.monotonic() < deadline, f"{process} is still there"
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(process: subprocess.Popen[str]) -> str:
    """End the run, by force if need be, so that it does not disturb what comes after; what it printed."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=60)[0]
    os.killpg(process.pid, signal.SIGKILL)  # Ray's processes follow
    return process.communicate(timeout=60)[0]
