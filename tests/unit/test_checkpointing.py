"""Saving a whole run: what a failed save leaves behind, and where a run starts."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from slime.core.errors import ConfigError, UserError
from slime.ray.checkpointing import Checkpointer
from slime.runlog.checkpoint_folder import (
    TRACKER,
    CheckpointFolder,
    CheckpointMeta,
    find_checkpoint,
    read_meta,
)
from tests.args import make_args
from tests.killed import killed_at_each_change


class Trainer:
    """Stands for the training side: writes a file, or finds the disk full half way."""

    def __init__(self, *, full_disk: bool = False, trained_version: int = 1):
        self.full_disk, self.trained_version = full_disk, trained_version

    def save(self, rollout_id: int, path: str) -> None:
        (Path(path) / "weights").write_text("half")
        if self.full_disk:
            raise OSError(errno.ENOSPC, "No space left on device")
        (Path(path) / "weights").write_text("whole")

    def wait_save(self) -> None:
        pass


class Rollout:
    def save(self, path: str, rollout_id: int) -> None:
        (Path(path) / "rollout.json").write_text("{}")


def checkpointer(tmp_path: Path, **overrides) -> Checkpointer:
    return Checkpointer(make_args(**{"save": str(tmp_path), "load": str(tmp_path), **overrides}))


def test_a_run_starts_behind_its_last_checkpoint(tmp_path):
    fresh = checkpointer(tmp_path)
    assert (fresh.start_rollout_id, fresh.weight_version, fresh.loaded) == (0, 0, None)
    fresh.save(4, Trainer(trained_version=5), Rollout())
    resumed = checkpointer(tmp_path)
    assert (resumed.start_rollout_id, resumed.weight_version) == (5, 5)
    assert resumed.loaded == tmp_path / "iter_0000004"


def test_a_converted_model_is_nothing_to_continue(tmp_path):
    """A run that loads it starts at 0, and its first checkpoint takes the place of the model."""
    folder = CheckpointFolder(tmp_path)
    folder.begin(0)
    folder.commit(
        CheckpointMeta(rollout_id=0, weight_version=0, train_backend="fsdp", release=True)
    )
    checkpoints = checkpointer(tmp_path)
    assert (checkpoints.start_rollout_id, checkpoints.loaded) == (0, None)
    checkpoints.save(0, Trainer(), Rollout())
    assert checkpointer(tmp_path).start_rollout_id == 1


def test_a_full_disk_keeps_the_last_good_checkpoint_and_says_so(tmp_path):
    checkpoints = checkpointer(tmp_path)
    checkpoints.save(4, Trainer(), Rollout())
    with pytest.raises(UserError, match=r"rollout 9.*No space left.*iter_0000004.*--load"):
        checkpoints.save(9, Trainer(full_disk=True), Rollout())
    assert find_checkpoint(str(tmp_path)) == tmp_path / "iter_0000004"
    assert not list(tmp_path.glob("*.tmp"))


def test_in_the_background_it_counts_once_it_is_finished(tmp_path):
    checkpoints = checkpointer(tmp_path, async_save=True)
    checkpoints.save(4, Trainer(), Rollout())
    assert find_checkpoint(str(tmp_path)) is None
    checkpoints.finish(Trainer())
    assert read_meta(find_checkpoint(str(tmp_path))).rollout_id == 4


def test_nothing_is_saved_twice(tmp_path):
    checkpoints = checkpointer(tmp_path)
    checkpoints.save(4, Trainer(), Rollout())
    checkpoints.save(4, Trainer(full_disk=True), Rollout())  # would raise


def folders(tmp_path: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("iter_")) for folder in tmp_path.glob("iter_*"))


def test_a_rewound_run_keeps_what_it_saves_and_resumes_from_it(tmp_path):
    first = checkpointer(tmp_path)
    for rollout_id in (9, 19, 29):
        first.save(rollout_id, Trainer(), Rollout())
    rewound = checkpointer(tmp_path, ckpt_step=9, save_total_limit=2)
    for saved, left in (
        (14, [9, 14, 19, 29]),
        (22, [14, 19, 22, 29]),  # later than an abandoned one, which still keeps no place
        (34, [22, 29, 34]),  # abandoned ones that are older than all kept ones are removed
    ):
        rewound.save(saved, Trainer(), Rollout())
        assert folders(tmp_path) == left
        assert find_checkpoint(str(tmp_path)) == tmp_path / f"iter_{saved:07d}"
        assert (tmp_path / TRACKER).read_text().strip() == str(saved)
    assert CheckpointFolder(tmp_path).rollout_ids() == [22, 34]
    assert find_checkpoint(str(tmp_path), 29) == tmp_path / "iter_0000029"


def test_a_rewound_run_says_that_its_command_would_rewind_again(tmp_path):
    for rollout_id in (9, 19):
        checkpointer(tmp_path).save(rollout_id, Trainer(), Rollout())
    rewound = checkpointer(tmp_path, ckpt_step=9)
    rewound.save(14, Trainer(), Rollout())
    advice = rewound.how_to_continue()
    assert "after rollout 14" in advice and "without --ckpt-step" in advice
    assert "starts again with rollout 10" in advice
    assert "the same command continues from it." in checkpointer(tmp_path).how_to_continue()
    numbered = checkpointer(tmp_path, start_rollout_id=3).how_to_continue()
    assert "without --start-rollout-id the same command continues" in numbered
    assert "starts again with rollout 3" in numbered
    both = checkpointer(tmp_path, ckpt_step=9, start_rollout_id=0).how_to_continue()
    assert (
        "without --ckpt-step and --start-rollout-id the same" in both and "with rollout 0." in both
    )
    next_number = checkpointer(tmp_path, ckpt_step=9, start_rollout_id=15).how_to_continue()
    assert "without --ckpt-step the same" in next_number and "with rollout 15." in next_number
    elsewhere = checkpointer(tmp_path, load=None, start_rollout_id=3).how_to_continue()
    assert elsewhere.endswith(f"--load {tmp_path}, without --start-rollout-id")


def test_a_run_that_returns_to_an_abandoned_checkpoint_continues_its_branch(tmp_path):
    for step, rollout_id in ((None, 9), (None, 19), (9, 14), (19, 24)):
        checkpointer(tmp_path, ckpt_step=step).save(rollout_id, Trainer(), Rollout())
    assert CheckpointFolder(tmp_path).rollout_ids() == [9, 14, 19, 24]
    checkpointer(tmp_path, ckpt_step=14).save(17, Trainer(), Rollout())
    assert CheckpointFolder(tmp_path).rollout_ids() == [9, 14, 17]


def test_a_damaged_checkpoint_after_a_rewind_names_one_of_the_same_branch(tmp_path):
    for step, rollout_id in ((None, 9), (None, 29), (9, 14)):
        checkpointer(tmp_path, ckpt_step=step).save(rollout_id, Trainer(), Rollout())
    (tmp_path / "iter_0000014" / "weights").unlink()
    with pytest.raises(ConfigError, match=r"iter_0000014 is damaged.*--ckpt-step 9$"):
        checkpointer(tmp_path)


def test_a_rewound_run_that_is_killed_never_resumes_from_between(tmp_path):
    origin, root = tmp_path / "origin", tmp_path / "work"
    for rollout_id in (9, 19, 29):
        checkpointer(origin).save(rollout_id, Trainer(), Rollout())
    shutil.copytree(origin, root)
    newest = []
    rewound = checkpointer(root, ckpt_step=9, save_total_limit=2)
    for _ in killed_at_each_change(rewound.save, 19, Trainer(), Rollout()):
        newest.append(CheckpointFolder(root).rollout_ids()[-1])
        again = checkpointer(root, ckpt_step=9)
        again.save(14, Trainer(), Rollout())
        assert CheckpointFolder(root).rollout_ids() == [9, 14]
        shutil.rmtree(root)
        shutil.copytree(origin, root)
    assert list(dict.fromkeys(newest)) == [29, 9, 19]  # not saved yet, marked, saved
    assert folders(root) == [9, 19, 29] and find_checkpoint(str(root)) == root / "iter_0000019"


def test_the_critics_folder_keeps_the_critic_of_a_rewound_run(tmp_path):
    class Both(Trainer):
        def save(self, rollout_id: int, path: str, critic_path: str) -> None:
            super().save(rollout_id, path)
            super().save(rollout_id, critic_path)

    options = {"advantage_estimator": "ppo", "critic_save": str(tmp_path / "critic")}
    for step, rollout_id in ((None, 9), (None, 19), (None, 29), (9, 14)):
        run = checkpointer(tmp_path / "actor", ckpt_step=step, save_total_limit=3, **options)
        run.save(rollout_id, Both(), Rollout())
    again = checkpointer(tmp_path / "actor", save_total_limit=1, **options)
    assert again.critic_loaded == tmp_path / "critic" / "iter_0000014"
    again.save(24, Both(), Rollout())
    assert folders(tmp_path / "actor") == folders(tmp_path / "critic") == [24, 29]


def test_a_last_rollout_that_is_trained_again_is_saved_again(tmp_path):
    checkpointer(tmp_path).save(9, Trainer(trained_version=10), Rollout())
    again = checkpointer(tmp_path, start_rollout_id=5)
    again.save(9, Trainer(trained_version=20), Rollout())
    assert read_meta(find_checkpoint(str(tmp_path))).weight_version == 20


def test_a_checkpoint_of_the_other_backend_is_refused(tmp_path):
    checkpointer(tmp_path, train_backend="megatron").save(4, Trainer(), Rollout())
    with pytest.raises(ConfigError, match="--train-backend megatron"):
        checkpointer(tmp_path)


def test_a_checkpoint_without_a_critic_is_refused_for_ppo(tmp_path):
    checkpointer(tmp_path).save(4, Trainer(), Rollout())
    with pytest.raises(ConfigError, match=r"has no critic.*--critic-load"):
        checkpointer(tmp_path, advantage_estimator="ppo")
    critics = tmp_path / "critics"
    (critics / "iter_0000004").mkdir(parents=True)
    found = checkpointer(tmp_path, advantage_estimator="ppo", critic_load=str(critics))
    assert found.critic_loaded == critics / "iter_0000004"


def test_an_empty_load_and_a_finished_run_are_reported(tmp_path):
    (said,) = checkpointer(tmp_path).warnings
    assert said == f"--load {tmp_path} holds no checkpoint: the run starts from scratch"
    checkpointer(tmp_path).save(2, Trainer(), Rollout())
    assert checkpointer(tmp_path, num_rollout=4).warnings == []
    (said,) = checkpointer(tmp_path, num_rollout=3).warnings
    assert "rollout 3 and --num-rollout is 3; raise it" in said
    assert Checkpointer(make_args()).warnings == []


def test_a_run_without_a_trainer_leaves_no_checkpoint(tmp_path):
    checkpointer(tmp_path, debug_rollout_only=True).save(0, Trainer(), Rollout())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_in_the_background_leaves_no_half_checkpoint(tmp_path):
    class Full(Trainer):
        def wait_save(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = checkpointer(tmp_path, async_save=True)
    checkpoints.save(4, Trainer(), Rollout())
    checkpoints.finish(Trainer())
    checkpoints.save(9, Trainer(), Rollout())
    with pytest.raises(UserError, match=r"rollout 9.*No space left.*iter_0000004.*--load"):
        checkpoints.finish(Full())
    assert find_checkpoint(str(tmp_path)) == tmp_path / "iter_0000004"
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("limit", [0, 4, 64])
def test_no_room_for_any_file_of_a_commit_leaves_the_last_good_one(tmp_path, limit):
    """The limit on the size of files stands for a full disk: every write beyond it fails."""
    checkpointer(tmp_path).save(4, Trainer(), Rollout())
    process = multiprocessing.get_context("fork").Process(target=_save, args=(tmp_path, limit))
    process.start()
    process.join()
    assert process.exitcode == 3  # refused in words
    assert find_checkpoint(str(tmp_path)) == tmp_path / "iter_0000004"
    assert read_meta(tmp_path / "iter_0000004").rollout_id == 4
    assert not list(tmp_path.glob("*.tmp"))


def _save(folder: Path, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpointer(folder).save(9, Trainer(), Rollout())
    except UserError:
        os._exit(3)
    os._exit(0)


def foreign(tmp_path: Path, name: str, tracker: str | None) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "common.pt").touch()
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)


@pytest.mark.parametrize(
    ("name", "tracker", "sentence"),
    [
        ("iter_0000020", "20", "is not a torch_dist checkpoint; slime reads torch_dist"),
        (
            "iter_0000020",
            None,
            "holds iter_0000020, but latest_checkpointed_iteration.txt must hold",
        ),
        ("release", None, "holds release, but latest_checkpointed_iteration.txt must hold"),
        (
            "iter_0000020",
            "30",
            "holds iter_0000020, but latest_checkpointed_iteration.txt must hold",
        ),
        ("iter_0000020", "../x", "must hold the number of a checkpoint there, or release"),
    ],
)
def test_another_tools_checkpoint_is_never_passed_over(name, tracker, sentence, tmp_path):
    """A run that started from scratch here would overwrite the tracker."""
    foreign(tmp_path, name, tracker)
    with pytest.raises(ConfigError, match=sentence):
        checkpointer(tmp_path, train_backend="megatron")


def test_a_checkpoint_of_ours_without_its_metadata_is_damaged(tmp_path):
    foreign(tmp_path, "iter_0000003", "3")
    (tmp_path / "iter_0000003" / "trainer.json").touch()
    with pytest.raises(ConfigError, match=r"iter_0000003 is damaged: meta.json is missing"):
        checkpointer(tmp_path, train_backend="megatron")


def test_the_runs_own_newer_checkpoint_wins(tmp_path):
    foreign(tmp_path, "release", "release")
    assert find_checkpoint(str(tmp_path)) == tmp_path / "release"
    folder = CheckpointFolder(tmp_path)
    folder.begin(0)
    folder.commit(CheckpointMeta(rollout_id=0, weight_version=1, train_backend="megatron"))
    assert find_checkpoint(str(tmp_path)) == tmp_path / "iter_0000000"
