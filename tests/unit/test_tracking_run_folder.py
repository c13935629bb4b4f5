"""The folder of a run: what may become one, what is recorded, and that it can be repeated."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import yaml

from slime.config.arguments import parse_args
from slime.core.errors import ConfigError
from slime.runlog.jsonl import read_lines
from slime.runlog.logging import setup_logging
from slime.runlog.run_folder import hold_folder, hold_run_folder, open_run_folder
from slime.runlog.tracking import Tracker
from tests.args import make_args


def test_config_can_be_loaded_again_and_holds_no_secret(tmp_path: Path):
    args = make_args(
        run_dir=str(tmp_path / "run"),
        lr=3e-4,
        rollout_stop=["a", "b"],
        use_kl_loss=True,
        apply_chat_template_kwargs={"enable_thinking": False},
        wandb_key="very-secret",
    )
    run_dir = open_run_folder(args)
    again = parse_args(["--config", str(run_dir / "config.yaml"), "--run-dir", str(tmp_path / "b")])
    own = ("config", "run_dir", "update_weight_disk_dir", "wandb_key")
    kept, loaded = args.to_dict(redact=False), again.to_dict(redact=False)
    assert {k: v for k, v in kept.items() if k not in own} == {
        k: v for k, v in loaded.items() if k not in own
    }
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if b"very-secret" in path.read_bytes()]


def test_every_value_has_its_origin(tmp_path: Path):
    args = make_args(run_dir=str(tmp_path / "run"), lr=3e-4)
    resolved = yaml.safe_load((open_run_folder(args) / "config_resolved.yaml").read_text())
    assert resolved["lr"] == {"value": 3e-4, "origin": "command line"}
    assert resolved["eps_clip"]["origin"] == "default"
    assert resolved["global_batch_size"]["origin"] == "derived"


def test_environment_has_one_entry_per_start(tmp_path: Path):
    args = make_args(run_dir=str(tmp_path / "run"))
    open_run_folder(args)
    starts = json.loads((open_run_folder(args) / "environment.json").read_text())["starts"]
    assert len(starts) == 2
    assert starts[0]["packages"]["torch"] and starts[0]["time"] <= starts[1]["time"]


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not the folder of a slime run"):
        open_run_folder(make_args(run_dir=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_not_a_folder(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        open_run_folder(make_args(run_dir=str(tmp_path / "file")))


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield root
    for handler in [h for h in root.handlers if h not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def test_driver_log_takes_everything_and_the_console_little(
    tmp_path: Path, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
):
    setup_logging(tmp_path)
    setup_logging(tmp_path)  # again: nothing is written twice
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("slime.x").warning("went on", exc_info=True)
    logging.getLogger("slime.x").info("plain fact")
    logging.getLogger("urllib3.connectionpool").info("GET /")
    lines = (tmp_path / "logs" / "driver.log").read_text()
    assert lines.count("plain fact") == 1 and "ValueError: inner" in lines and "GET" not in lines
    assert capsys.readouterr().err == "warning: went on\nplain fact\n"


def test_only_one_run_at_a_time_in_a_folder(tmp_path):
    held = hold_run_folder(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="another run is using it"):
        hold_run_folder(str(tmp_path / "run"))
    os.close(held)
    os.close(hold_run_folder(str(tmp_path / "run")))


def test_only_one_run_at_a_time_saves_to_a_folder(tmp_path):
    held = hold_folder(str(tmp_path / "checkpoints"), "--save")
    with pytest.raises(ConfigError, match=r"--save .*another run is using it"):
        hold_folder(str(tmp_path / "checkpoints"), "--save")
    os.close(held)


def test_metrics_go_on_when_their_folder_is_deleted(tmp_path):
    tracker = Tracker(make_args(run_dir=str(tmp_path / "run")), tmp_path / "run")
    tracker.log({"train/loss": 1.0}, rollout_id=0, kind="train")
    shutil.rmtree(tmp_path / "run")
    tracker.log({"train/loss": 2.0}, rollout_id=1, kind="train")
    tracker.close()
    (record,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert (record["rollout_id"], record["train/loss"]) == (1, 2.0)
