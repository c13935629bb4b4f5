"""Checkpoint folders: complete or absent, whatever moment the writer dies at."""

import json

import pytest

from slime.utils.checkpoint import (
    TRACKER,
    CheckpointFolder,
    CheckpointMeta,
    find_checkpoint,
    read_meta,
)
from slime.utils.errors import ConfigError


def meta(rollout_id: int) -> CheckpointMeta:
    return CheckpointMeta(
        rollout_id=rollout_id, weight_version=rollout_id + 1, train_backend="fsdp"
    )


def write(folder: CheckpointFolder, rollout_id: int, text: str = "x", keep: int | None = None):
    (folder.begin(rollout_id) / "data").write_text(text)
    return folder.commit(meta(rollout_id), keep=keep)


def test_a_committed_checkpoint_is_found_with_its_meta(tmp_path):
    write(CheckpointFolder(tmp_path), 19)
    found = find_checkpoint(str(tmp_path))
    assert found == tmp_path / "iter_0000019"
    assert read_meta(found) == meta(19)
    assert (tmp_path / TRACKER).read_text().strip() == "19"


def test_an_unfinished_save_leaves_the_last_good_one(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 4)
    (folder.begin(9) / "data").write_text("half")  # the process dies here
    assert find_checkpoint(str(tmp_path)) == folder.path(4)
    write(folder, 9, "whole")  # the next run saves the same rollout again
    assert (find_checkpoint(str(tmp_path)) / "data").read_text() == "whole"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_crash_between_rename_and_tracker_still_finds_the_newest(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 4)
    write(folder, 9)
    (tmp_path / TRACKER).write_text("4\n")
    assert find_checkpoint(str(tmp_path)) == folder.path(9)


def test_a_folder_without_meta_does_not_count(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.path(3).mkdir(parents=True)
    assert find_checkpoint(str(tmp_path)) is None


def test_saving_the_same_rollout_twice_keeps_the_second(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 4, "first")
    write(folder, 4, "second")
    assert (folder.path(4) / "data").read_text() == "second"


@pytest.mark.parametrize(("keep", "left"), [(1, [14]), (2, [9, 14]), (10, [4, 9, 14]), (0, [14])])
def test_only_the_newest_are_kept_and_never_none(tmp_path, keep, left):
    folder = CheckpointFolder(tmp_path)
    for rollout_id in (4, 9, 14):
        write(folder, rollout_id, keep=keep)
    assert folder.rollout_ids() == left


def test_ckpt_step_names_a_checkpoint_or_says_which_there_are(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 4)
    write(folder, 9)
    assert find_checkpoint(str(tmp_path), 4) == folder.path(4)
    with pytest.raises(ConfigError, match=r"--ckpt-step 5.*\[4, 9\]"):
        find_checkpoint(str(tmp_path), 5)


def test_no_folder_no_checkpoint(tmp_path):
    assert find_checkpoint(None) is None
    assert find_checkpoint(str(tmp_path / "nothing")) is None


def test_meta_is_plain_json(tmp_path):
    path = write(CheckpointFolder(tmp_path), 2)
    assert json.loads((path / "meta.json").read_text())["rollout_id"] == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "data").write_text("x"), "data has 1 of its 5 bytes"),
        (lambda path: (path / "data").unlink(), "data is missing"),
        (lambda path: (path / "meta.json").write_text("{"), "meta.json cannot be read"),
        (lambda path: (path / "meta.json").write_text("{}"), "meta.json cannot be read"),
    ],
)
def test_a_checkpoint_that_lost_a_part_is_refused_with_the_others_named(tmp_path, damage, said):
    folder = CheckpointFolder(tmp_path)
    write(folder, 4, "whole")
    path = write(folder, 9, "whole")
    damage(path)
    with pytest.raises(ConfigError) as caught:
        read_meta(path)
    assert f"{path} is damaged: {said}" in str(caught.value)
    assert "--ckpt-step 4" in str(caught.value)
    assert read_meta(folder.path(4)) == meta(4)


def test_a_checkpoint_without_recorded_sizes_is_read(tmp_path):
    path = write(CheckpointFolder(tmp_path), 3)
    words = json.loads((path / "meta.json").read_text())
    assert words.pop("sizes") == {"data": 1}
    (path / "meta.json").write_text(json.dumps(words))
    assert read_meta(path) == meta(3)
