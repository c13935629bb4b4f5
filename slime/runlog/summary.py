"""The closing lines of a run: what was learned, the path of the report, what to try next."""

from __future__ import annotations

import shlex
from pathlib import Path

from slime.config.flags.spec import option_of
from slime.runlog import metric_names as names
from slime.runlog.export_folder import export_info
from slime.runlog.format import count, duration, score
from slime.runlog.report import REPORT_FILE
from slime.runlog.run_folder import CONFIG_FILE, RunData, read_run
from slime.utils.printable import safe_text

_NEW_PLACES = {
    "save": "checkpoints",
    "critic_save": "critic",
    "save_hf": "hf",
    "save_debug_rollout_data": "rollout_{rollout_id}.pt",
    "save_debug_train_data": "train_{rollout_id}_{rank}.pt",
}


def closing_lines(run_dir: str | Path) -> list[str]:
    run = read_run(run_dir)
    lines = ["", *_learned(run)]
    report = run.run_dir / REPORT_FILE
    if report.exists():
        lines.append(f"Report: {_path(report)}")
    lines += ["Next, try:", *(f"  {command}" for command in _next_commands(run))]
    return [safe_text(line) for line in lines]


def _learned(run: RunData) -> list[str]:
    done = run.rollouts()
    if done == 0:
        return ["No rollout was completed."]
    tokens = run.total(names.RESPONSE_TOKENS)
    effort = f"{done} rollout{'s' if done != 1 else ''} in {duration(run.seconds())}"
    effort += f", {count(tokens)} response tokens" if tokens else ""
    changes = [
        f"{_change(run.eval_reward(dataset))} on held-out {dataset}"
        for dataset in run.eval_datasets()
    ]
    if not changes and (points := run.series.get(names.REWARD)):
        changes = [f"{_change(points)} in training (no evaluation was run)"]
    if not changes and (points := run.series.get(names.LOSS)):
        return [f"Loss {_change(points)} on the data learned from", f"{effort}."]
    return [f"Mean reward {change}" for change in changes] + [f"{effort}."]


def _change(points: list[tuple[int, float]]) -> str:
    first, last = points[0][1], points[-1][1]
    return score(last) if len(points) == 1 else f"{score(first)} -> {score(last)}"


def _next_commands(run: RunData) -> list[str]:
    """Return three commands for this run: use the model, continue training, change something."""
    commands = [_use(run)]
    if run.config.get("save"):
        commands.append(_continue(run))
    if run.config.get("lr"):
        commands.append(_repeat(run))
    others = [f"slime train --config {_path(run.run_dir / CONFIG_FILE)} --dry-run", "slime doctor"]
    return [*commands, *others][:3]


def _use(run: RunData) -> str:
    export = run.config.get("save_hf")
    folder = Path(export.format(rollout_id=_last_rollout(run)) if export else run.run_dir / "hf")
    if export_info(folder) and run.config.get("lora_rank"):
        base = _path(Path(run.config["hf_checkpoint"]))
        return f"slime engine --model-path {base} --lora-path mine={_path(folder)} --port 30000"
    if export_info(folder):
        return f"slime engine --model-path {_path(folder)} --port 30000"
    return f"slime report {_path(run.run_dir)}"


def _continue(run: RunData) -> str:
    command = (
        f"slime train --config {_path(run.run_dir / CONFIG_FILE)} --run-dir {_path(run.run_dir)}"
    )
    command += f" --load {_path(run.config['save'])}"
    if _last_rollout(run) + 1 < (run.config.get("num_rollout") or 0):
        return command
    if run.config.get("num_epoch"):
        return f"{command} --num-epoch {run.config['num_epoch'] + 1}"
    return f"{command} --num-rollout {_last_rollout(run) + 1 + max(10, run.rollouts() // 2)}"


def _repeat(run: RunData) -> str:
    """Return the command of the same run with another learning rate, in new folders."""
    other = Path(f"{run.run_dir}-lr")
    folders = {"run_dir": other}
    for name, folder in _NEW_PLACES.items():  # those inside the run folder move with it
        value = run.config.get(name)
        if value and not Path(value).absolute().is_relative_to(run.run_dir.absolute()):
            folders[name] = other / folder
    options = " ".join(f"{option_of(n)} {_path(f)}" for n, f in folders.items())
    lr = f"{run.config['lr'] / (10 if _fell(run) else 2):g}"
    return f"slime train --config {_path(run.run_dir / CONFIG_FILE)} {options} --lr {lr}"


def _fell(run: RunData) -> bool:
    """Return whether training lost nine tenths of its first reward, as too large a learning rate does."""
    points = run.series.get(names.REWARD) or [(0, 0.0)]
    return points[-1][1] < points[0][1] / 10


def _path(path: str | Path) -> str:
    """Format a path for the command line: relative to the working directory if inside it, quoted."""
    path = Path(path)
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _last_rollout(run: RunData) -> int:
    return max((rollout_id for rollout_id, _ in run.phases), default=-1)
