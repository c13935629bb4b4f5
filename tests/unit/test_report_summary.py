"""The closing lines of a run, and that what they tell people to type is accepted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from slime.config.arguments import parse_args
from slime.runlog.export_folder import MARKER
from slime.runlog.report import write_report
from slime.runlog.run_folder import write_config
from slime.runlog.summary import closing_lines
from tests.args import make_args
from tests.synthetic_run import write_run


def commands(lines: list[str]) -> list[list[str]]:
    return [shlex.split(line) for line in lines if line.startswith("  slime ")]


def test_says_what_was_learned_and_where_the_report_is(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", rollouts=12, planned=12)
    write_report(run_dir)
    lines = closing_lines(run_dir)
    text = "\n".join(lines)
    assert "on held-out addition" in text and " -> " in text
    assert "12 rollouts in" in text and str(run_dir / "report.html") in text
    assert len(commands(lines)) == 3


def test_a_run_that_completed_nothing_says_so(tmp_path: Path):
    assert "No rollout was completed." in closing_lines(tmp_path)


@pytest.mark.parametrize("with_export", [False, True])
def test_the_suggested_train_commands_parse(tmp_path: Path, with_export: bool):
    run_dir = write_run(tmp_path / "a run", rollouts=4, planned=4)
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir()
    args = make_args(
        run_dir=str(run_dir),
        save=str(checkpoints),
        save_hf=str(run_dir / "hf"),
        lr=1e-3,
        num_rollout=4,
    )
    write_config(args, run_dir)
    if with_export:
        (run_dir / "hf").mkdir()
        (run_dir / "hf" / "config.json").write_text("{}")
        assert (
            commands(closing_lines(run_dir))[0][1] == "report"
        )  # an export that was never finished
        (run_dir / "hf" / MARKER).write_text('{"rollout_id": 3, "run_dir": null}')
    use, carry_on, repeat = commands(closing_lines(run_dir))
    expected = ["engine", "--model-path", str(run_dir / "hf")] if with_export else ["report"]
    assert use[1 : 1 + len(expected)] == expected
    continued, repeated = parse_args(carry_on[2:]), parse_args(repeat[2:])
    assert continued.load == str(checkpoints) and continued.run_dir == str(run_dir)
    assert continued.num_rollout > 4
    assert repeated.lr == 5e-4 and repeated.run_dir != str(run_dir)
    assert repeated.save != str(checkpoints)  # or it would write over the first run's checkpoints


def test_after_a_collapse_a_much_smaller_learning_rate_is_suggested(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", rollouts=4, planned=4)
    write_config(make_args(run_dir=str(run_dir), lr=10.0, num_rollout=4), run_dir)
    with (run_dir / "metrics.jsonl").open("a") as file:
        record = {"rollout_id": 3, "kind": "rollout", "time": 1.0, "rollout/reward_mean": 0.0}
        file.write(json.dumps(record) + "\n")
    repeat = commands(closing_lines(run_dir))[1]
    assert repeat[-2:] == ["--lr", "1"]


def test_an_adapter_is_served_beside_its_base(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", rollouts=4, planned=4)
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, "save_hf": str(run_dir / "adapter")}
    args = make_args(run_dir=str(run_dir), num_rollout=4, **flags)
    write_config(args, run_dir)
    (run_dir / "adapter").mkdir()
    (run_dir / "adapter" / MARKER).write_text('{"rollout_id": 3, "run_dir": null}')
    use = commands(closing_lines(run_dir))[0]
    assert use[1:4] == ["engine", "--model-path", args.hf_checkpoint]
    assert use[4:6] == ["--lora-path", f"mine={run_dir}/adapter"]


def test_an_interrupted_run_is_continued_to_its_own_end(tmp_path: Path):
    """Stopped after 4 of 20 rollouts, with outputs outside the run folder and after a resume."""
    run_dir = write_run(tmp_path / "run", rollouts=4, planned=20)
    save = str(tmp_path / "checkpoints")
    flags = {"run_dir": str(run_dir), "save": save, "load": save, "save_hf": str(tmp_path / "hf")}
    write_config(make_args(lr=1e-3, num_rollout=20, **flags), run_dir)
    _, carry_on, repeat = commands(closing_lines(run_dir))
    continued, repeated = parse_args(carry_on[2:]), parse_args(repeat[2:])
    assert (continued.num_rollout, continued.load, continued.save) == (20, save, save)
    assert "--load" not in repeat and repeated.load is None
    new = f"{run_dir}-lr"
    assert (repeated.save, repeated.save_hf) == (f"{new}/checkpoints", f"{new}/hf")


def test_supervised_runs_tell_their_loss(tmp_path: Path):
    lines = [
        {"rollout_id": n, "kind": kind, "time": float(n), name: value}
        for n, loss in enumerate([3.5, 0.25])
        for kind, name, value in [("train", "train/loss", loss), ("perf", "perf/step_time", 1.0)]
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = "\n".join(closing_lines(tmp_path))
    assert "Loss 3.500 -> 0.250" in text
    assert "reward" not in text.lower()
