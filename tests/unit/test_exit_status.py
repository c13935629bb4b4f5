"""How a command ends: one paragraph for the user, advice last, the right status, also on a full disk."""

from __future__ import annotations

import errno
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import train
import train_async
from slime import __version__, cli
from slime.cli import async_loop, loop
from slime.config.arguments import parse_args
from slime.core.errors import ConfigError, UserError
from slime.diagnosis.exit_status import add_advice, run_command
from slime.runlog.run_folder import open_run_folder
from tests.args import make_args, make_argv

ADVICE = "The checkpoint after rollout 3 is in /ck: the same command continues from it."


def failing(error: BaseException, advice: str | None = ADVICE):
    def work() -> int:
        if advice is not None:
            add_advice(error, advice)
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "status"),
    [(UserError("no"), 1), (ConfigError("no"), 2), (RuntimeError("no\x1b]0;x\x07"), 1)],
)
def test_an_error_ends_with_the_advice(error, status, capsys: pytest.CaptureFixture[str]):
    assert run_command(failing(error)) == status
    shown = capsys.readouterr().err
    assert shown.count(ADVICE) == 1 and shown.rstrip().endswith(ADVICE)
    assert ("Traceback" in shown) == (not isinstance(error, UserError))
    assert "\x1b" not in shown


def test_a_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str]):
    error = OSError(errno.ENOSPC, "No space left on device", "/runs/a/metrics.jsonl")
    assert run_command(failing(error)) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "slime: /runs/a/metrics.jsonl cannot be written: No space left on device"
    assert second == ADVICE


def test_a_full_disk_of_another_process_is_the_same_sentence(capsys: pytest.CaptureFixture[str]):
    """As Ray hands the error of an actor over: with a traceback for a text, the error as its cause."""
    error = RuntimeError("ray::RolloutManager.generate()\nTraceback ...")
    vars(error)["cause"] = OSError(errno.ENOSPC, "No space left on device", "/runs/a/samples.jsonl")
    assert run_command(failing(error)) == 1
    assert "Traceback" not in (shown := capsys.readouterr().err)
    assert shown.startswith("slime: /runs/a/samples.jsonl cannot be written: No space left")


def test_an_interrupt_has_its_status(capsys: pytest.CaptureFixture[str]):
    assert run_command(failing(KeyboardInterrupt(), None)) == 130
    assert capsys.readouterr().err == "slime: interrupted\n"


_FULL = """
import logging, resource, sys
from pathlib import Path
from slime.data.stored_samples import save_debug_samples
from slime.core.errors import UserError
from slime.runlog.logging import setup_logging

folder = Path(sys.argv[1])
setup_logging(folder, console=False)
log = logging.getLogger("slime.x")
log.info("before")
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
for number in range(50):
    log.info("line %d of a log that does not fit", number)
try:
    save_debug_samples(str(folder / "{rollout_id}.pt"), 3, [])
except UserError as error:
    print(error)
"""


def test_a_full_disk_leaves_no_traceback_of_logging_or_torch(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert f"--save-debug-rollout-data: {tmp_path}/3.pt cannot be written" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs"]
    assert "before" in (tmp_path / "logs" / "driver.log").read_text()


@pytest.mark.parametrize("rollouts", [loop.rollouts, async_loop.rollouts])
def test_the_loops_look_at_the_signal_once_per_rollout(rollouts):
    """Or one that comes between two looks stops the run without the save it promised."""
    assert inspect.getsource(rollouts).count("run.stopping") == 1


def test_an_asynchronous_run_repeats_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = open_run_folder(make_args(run_dir=str(tmp_path / "run"), train_async=True))
    words = ["--config", str(run_dir / "config.yaml"), "--run-dir", str(tmp_path / "b")]
    assert parse_args(words).train_async
    for main in (train.main, train_async.main, lambda w: cli.main(["train", *w])):
        assert main([*words, "--colocate"]) == 2  # which only the asynchronous loop refuses
        assert "train_async.py generates and trains at the same time" in capsys.readouterr().err
    plain = make_argv(run_dir=str(tmp_path / "c"), colocate=True)
    assert train_async.main(plain) == 2


def test_version_and_usage_name_the_command(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"slime {__version__}\n"
    done = subprocess.run(
        [sys.executable, "-m", "slime.cli", "train", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: slime train ")


def test_a_refused_start_lets_go_of_its_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = make_args(run_dir=str(tmp_path / "run"))
    (Path(args.hf_checkpoint) / "tokenizer.json").touch()
    run_dir = open_run_folder(args)
    (run_dir / "metrics.jsonl").write_text('{"rollout_id": 7, "kind": "train", "time": 1.0}\n')
    for _ in range(2):
        assert train.main(make_argv(run_dir=str(run_dir), lr=0.5)) == 2
        assert "holds the metrics of a run of 1 rollout" in capsys.readouterr().err
