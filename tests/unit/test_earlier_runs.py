"""Results of an earlier run: a later start writes to them only where it was asked to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slime.config.arguments import Args, parse_args
from slime.core.errors import ConfigError
from slime.runlog.checkpoint_folder import CheckpointFolder, CheckpointMeta, find_checkpoint
from slime.runlog.earlier_runs import name_owner
from slime.runlog.run_folder import open_run_folder, resume_line
from tests.args import make_args


def start(args: Args) -> Path:
    """What a start does with folders, before any process of the run."""
    run_dir = open_run_folder(args, loaded=find_checkpoint(args.load, args.ckpt_step))
    if args.save:
        Path(args.save).mkdir(parents=True, exist_ok=True)
        name_owner(args)
    return run_dir


def train(args: Args, rollouts: int, *, save: bool = True) -> None:
    """Leave behind what a run of so many rollouts does."""
    lines = [{"rollout_id": -1, "kind": "start", "time": 1.0}]
    lines += [{"rollout_id": i, "kind": "train", "time": 1.0} for i in range(rollouts)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (Path(args.run_dir) / "metrics.jsonl").write_text(text)
    if save and args.save:
        folder = CheckpointFolder(args.save)
        (folder.begin(rollouts - 1) / "weights").write_text(f"of {args.run_dir}")
        folder.commit(
            CheckpointMeta(rollout_id=rollouts - 1, weight_version=1, train_backend="fsdp")
        )
    if save and args.save_hf:
        export = Path(args.save_hf.format(rollout_id=rollouts - 1))
        export.mkdir(parents=True, exist_ok=True)
        (export / "model.safetensors").write_text(f"of {args.run_dir}")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def finished_run(tmp_path: Path, **overrides) -> Args:
    first = tmp_path / "first"
    flags = {"save": str(first / "checkpoints"), "save_hf": str(first / "hf"), **overrides}
    args = make_args(run_dir=str(first), num_rollout=3, **flags)
    start(args)
    train(args, 3)
    return args


def test_a_stored_configuration_repeats_the_run_in_its_new_folder(tmp_path: Path):
    first = finished_run(
        tmp_path, save_debug_rollout_data=str(tmp_path / "first/d/{rollout_id}.pt")
    )
    before = contents(tmp_path / "first")
    again = parse_args(
        ["--config", f"{first.run_dir}/config.yaml", "--run-dir", str(tmp_path / "second")]
    )
    assert again.save == str(tmp_path / "second/checkpoints")
    assert again.save_hf == str(tmp_path / "second/hf")
    assert again.save_debug_rollout_data == str(tmp_path / "second/d/{rollout_id}.pt")
    start(again)
    train(again, 2)
    assert contents(tmp_path / "first") == before
    assert (tmp_path / "second/hf/model.safetensors").exists()


def test_a_configuration_of_a_resumed_run_starts_its_repetition_anew(tmp_path: Path):
    first = finished_run(tmp_path)
    start(make_args(run_dir=first.run_dir, save=first.save, load=first.save, num_rollout=5))
    again = parse_args(
        ["--config", f"{first.run_dir}/config.yaml", "--run-dir", str(tmp_path / "second")]
    )
    assert again.load is None and again.save == str(tmp_path / "second/checkpoints")


def test_a_resume_says_where_it_goes_on_and_what_differs(tmp_path: Path):
    args = finished_run(tmp_path, lr=2e-4)
    assert resume_line(args, 3) == "continuing after rollout 2"
    given = {"save": args.save, "load": args.save, "save_hf": args.save_hf, "lr": 5e-5}
    again = make_args(run_dir=args.run_dir, num_rollout=5, seed=7, **given)
    changes = "--lr 0.0002 -> 5e-05, --num-rollout 3 -> 5, --seed unset -> 7"
    assert resume_line(again, 3) == f"continuing after rollout 2: {changes}"
    elsewhere = make_args(run_dir=str(tmp_path / "new"), num_rollout=5)
    assert resume_line(elsewhere, 3) == "continuing after rollout 2"


def test_inputs_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    given = make_args()
    os.symlink(given.hf_checkpoint, "model")
    os.symlink(given.prompt_data[0], "rows.jsonl")
    args = make_args(
        run_dir="runs/a",
        hf_checkpoint="model",
        prompt_data=["rows.jsonl@[0:1]"],
        eval_prompt_data=["held", "rows.jsonl"],
        eval_interval=1,
    )
    run_dir = start(args)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = parse_args(["--config", str(run_dir / "config.yaml"), "--run-dir", "b"])
    assert again.hf_checkpoint == str(tmp_path / "model")
    assert again.prompt_data == [f"{tmp_path}/rows.jsonl@[0:1]"]
    assert again.eval_datasets[0].path == f"{tmp_path}/rows.jsonl"
    assert again.run_dir == str(tmp_path / "elsewhere/b")


@pytest.mark.parametrize("flag", ["save", "save_hf", "save_debug_rollout_data"])
def test_outputs_of_another_run_are_refused_and_left_as_they_are(tmp_path: Path, flag: str):
    first = finished_run(
        tmp_path, save_debug_rollout_data=str(tmp_path / "first/d/{rollout_id}.pt")
    )
    (tmp_path / "first/d").mkdir()
    (tmp_path / "first/d/0.pt").write_text("rows")
    before = contents(tmp_path / "first")
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} .*nothing was written"):
        start(make_args(run_dir=str(tmp_path / "b"), **{flag: getattr(first, flag)}))
    assert contents(tmp_path / "first") == before
    assert not (tmp_path / "b").exists()


def test_a_run_resumed_in_another_run_folder_keeps_its_outputs(tmp_path: Path):
    """As run scripts do it: --load and --save are one folder, each start has a new --run-dir."""
    flags = {"save": str(tmp_path / "ck"), "load": str(tmp_path / "ck")}
    flags |= {"save_hf": str(tmp_path / "hf"), "num_rollout": 5}
    one = make_args(run_dir=str(tmp_path / "one"), **flags)
    start(one)
    train(one, 3)
    start(make_args(run_dir=str(tmp_path / "two"), **flags))
    with pytest.raises(ConfigError, match="--save-hf"):  # which no checkpoint links to that run
        start(make_args(run_dir=str(tmp_path / "three"), save_hf=str(tmp_path / "hf")))


def test_a_typo_in_load_cuts_nothing(tmp_path: Path):
    first = finished_run(tmp_path)
    before = contents(tmp_path / "first")
    with pytest.raises(ConfigError, match=f"add --load {first.save}"):
        start(
            make_args(run_dir=first.run_dir, save=first.save, load=first.save[:-1], num_rollout=3)
        )
    assert contents(tmp_path / "first") == before


def test_a_checkpoint_of_another_run_does_not_cut_the_metrics_of_this_one(tmp_path: Path):
    first = finished_run(tmp_path)
    other = make_args(run_dir=str(tmp_path / "other"), save=str(tmp_path / "other/ck"))
    start(other)
    train(other, 1)
    before = contents(tmp_path / "first")
    with pytest.raises(ConfigError, match="did not save to --load"):
        start(make_args(run_dir=first.run_dir, load=other.save))
    assert contents(tmp_path / "first") == before
    start(make_args(run_dir=first.run_dir, load=first.save, save=first.save))


def test_the_same_command_starts_anew_where_nothing_was_saved(tmp_path: Path):
    save = str(tmp_path / "run/checkpoints")
    args = make_args(run_dir=str(tmp_path / "run"), save=save, load=save, num_rollout=9)
    start(args)
    train(args, 4, save=False)
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
    start(args)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert (tmp_path / "run/attempt_1/metrics.jsonl").read_bytes() == metrics
    train(args, 1, save=False)
    start(args)
    assert sorted(p.name for p in (tmp_path / "run").glob("attempt_*")) == [
        "attempt_1",
        "attempt_2",
    ]


def test_another_command_does_not_start_in_a_folder_with_rollouts(tmp_path: Path):
    args = make_args(run_dir=str(tmp_path / "run"), num_rollout=9)
    start(args)
    train(args, 4)
    with pytest.raises(ConfigError, match=r"metrics of a run of 4 rollouts.*another --run-dir"):
        start(make_args(run_dir=str(tmp_path / "run"), num_rollout=9, lr=1.0))
    train(args, 9)
    with pytest.raises(ConfigError, match="another --run-dir"):  # complete: not an attempt
        start(args)


def test_a_folder_without_a_completed_rollout_is_free_for_any_command(tmp_path: Path):
    args = make_args(run_dir=str(tmp_path / "run"))
    start(args)
    train(args, 0)
    start(args)
    assert (tmp_path / "run/metrics.jsonl").exists()  # the same: its first evaluation counts
    start(make_args(run_dir=str(tmp_path / "run"), lr=1.0))
    assert (tmp_path / "run/attempt_1/metrics.jsonl").exists()
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.parametrize(
    "left",
    [
        ["logs"],
        ["logs", ".config.yaml.tmp"],
        ["logs", "config.yaml"],
        ["logs", "config.yaml", "config_resolved.yaml", ".environment.json.tmp"],
    ],
)
def test_a_start_killed_at_any_moment_leaves_a_folder_it_can_use_again(tmp_path: Path, left):
    args = make_args(run_dir=str(tmp_path / "run"))
    run_dir = start(args)
    for entry in run_dir.iterdir():
        if entry.is_file():
            entry.unlink()
    for name in left:
        if name != "logs":
            (run_dir / name).write_text("")
    start(args)
    assert (run_dir / "environment.json").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config_resolved.yaml", "- a list\n"),
        ("config_resolved.yaml", "lr: 1\n"),
        ("config.yaml", "just text\n"),
        ("config.yaml", "a: [unclosed\n"),
        ("config.yaml", "!!python/object/apply:os.system [id]\n"),
        ("metrics.jsonl", '{"kind": "train"}\n'),
        ("metrics.jsonl", '{"kind": "train", "rollout_id": [1]}\n'),
    ],
)
def test_records_that_no_run_wrote_are_refused_in_one_sentence(tmp_path, name, text):
    args = make_args(run_dir=str(tmp_path / "run"))
    start(args)
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(ConfigError, match="nothing was written"):
        start(args)
