"""Checkpoint folders: complete or absent, whatever moment the writer dies at."""

import json
import os
import shutil
import zlib
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.runlog.checkpoint_files import file_checksum, record_checksums, share_of_rank
from slime.runlog.checkpoint_folder import (
    TRACKER,
    CheckpointFolder,
    CheckpointMeta,
    check_quickly,
    check_share,
    find_checkpoint,
    read_meta,
)
from tests.killed import killed_at_each_change


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


@pytest.mark.parametrize("tracker", [b"release", b"3", b"\xff\x00", b"77", b"", b"9" * 9999])
def test_the_newest_complete_one_counts_whatever_the_tracker_says(tmp_path, tracker):
    folder = CheckpointFolder(tmp_path)
    write(folder, 9)
    for name in ("release", "iter_0000003"):  # of another tool
        (tmp_path / name).mkdir()
        (tmp_path / name / "common.pt").touch()
    (tmp_path / TRACKER).write_bytes(tracker)
    assert find_checkpoint(str(tmp_path)) == folder.path(9)


def test_folders_that_only_look_like_checkpoints_do_not_count(tmp_path):
    for name in ("release_notes", "iter_old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").touch()
    assert find_checkpoint(str(tmp_path)) is None


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
    assert words.pop("checksums").keys() == {"data"} and words.pop("checksum")
    (path / "meta.json").write_text(json.dumps(words))
    assert read_meta(path) == meta(3)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def zero(file: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size // 4] + bytes(size - size // 4))


@pytest.mark.parametrize("damage", [flip, zero])
@pytest.mark.parametrize("name", ["data", "rollout.json", "meta.json"])
def test_damage_of_the_right_size_is_found_and_an_intact_checkpoint_named(tmp_path, name, damage):
    folder = CheckpointFolder(tmp_path)
    for rollout_id in (4, 9, 14):
        aside = folder.begin(rollout_id)
        (aside / "data").write_bytes(bytes(range(256)) * 64)
        (aside / "rollout.json").write_text('{"position": 123456}')
        folder.commit(meta(rollout_id))
    damage(folder.path(14) / name)
    (folder.path(9) / "data").write_bytes(bytes(256 * 64))  # which must not be proposed
    with pytest.raises(ConfigError) as caught:
        check_quickly(folder.path(14), read_meta(folder.path(14)))
    assert f"{folder.path(14)} is damaged: {name} " in str(caught.value)
    assert "--ckpt-step 4" in str(caught.value) and "9" not in str(caught.value).split("step")[1]
    check_quickly(folder.path(4), read_meta(folder.path(4)))


@pytest.mark.parametrize("content", [None, "", "garbage\n", "999999\n"])
def test_the_tracker_file_is_not_needed(tmp_path, content):
    folder = CheckpointFolder(tmp_path)
    write(folder, 4)
    write(folder, 9)
    (tmp_path / TRACKER).unlink()
    if content is not None:
        (tmp_path / TRACKER).write_text(content)
    assert find_checkpoint(str(tmp_path)) == folder.path(9)
    assert find_checkpoint(str(tmp_path), 4) == folder.path(4)


def test_a_json_file_of_a_checkpoint_without_checksums_must_be_json(tmp_path):
    folder = CheckpointFolder(tmp_path)
    (folder.begin(4) / "rollout.json").write_text('{"position": 1}')
    path = folder.commit(meta(4))
    words = json.loads((path / "meta.json").read_text())
    for key in ("checksums", "checksum"):
        del words[key]
    (path / "meta.json").write_text(json.dumps(words))
    check_quickly(path, read_meta(path))
    (path / "rollout.json").write_text("\0" * 15)
    with pytest.raises(ConfigError, match=r"rollout\.json cannot be read"):
        check_quickly(path, read_meta(path))


def test_ranks_check_each_file_once_and_those_of_the_critic_apart(tmp_path):
    folder = CheckpointFolder(tmp_path)
    aside = folder.begin(4)
    names = [f"fsdp/__{rank}_0.distcp" for rank in range(4)]
    names += ["trainer.json", "critic/fsdp/__0_0.distcp", "critic/trainer.json"]
    for name in names:
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_text(name)
    for rank in range(4):
        record_checksums(aside, [aside / names[rank]], rank)
    path = folder.commit(meta(4))
    recorded = read_meta(path)
    assert recorded.checksums.keys() == recorded.sizes.keys() == set(names)
    assert recorded.checksums == {name: file_checksum(path / name) for name in names}
    shares = [share_of_rank(names, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    for name in names:
        flip(path / name)
        critic = name.startswith("critic/")
        for place, concerned in ((path, not critic), (path / "critic", critic)):
            found = [check_share(place, rank, 3) for rank in range(3)]
            assert sum(problem is not None for problem in found) == (1 if concerned else 0), name
            assert not concerned or any(problem and name in problem for problem in found)
        flip(path / name)
    assert check_share(tmp_path, 0, 1) is None  # not a checkpoint of a run: nothing is known


def test_the_checksum_of_blocks_is_that_of_the_file(tmp_path):
    block = 32 << 20
    data = bytes(range(256)) * (block // 256) + b"the rest"
    (tmp_path / "large").write_bytes(data)
    sums = [zlib.crc32(data[:block]), zlib.crc32(data[block:])]
    joined = b"".join(value.to_bytes(4, "little") for value in sums)
    assert file_checksum(tmp_path / "large") == f"{zlib.crc32(joined):08x}"
    (tmp_path / "empty").write_bytes(b"")
    assert file_checksum(tmp_path / "empty") == f"{zlib.crc32(b''):08x}"


def test_killed_at_any_moment_of_a_commit_all_that_count_are_whole_and_nothing_stays(tmp_path):
    origin, root = tmp_path / "origin", tmp_path / "work"
    for rollout_id in (4, 9, 14):
        write(CheckpointFolder(origin), rollout_id, str(rollout_id))
    shutil.copytree(origin, root)

    def save() -> None:
        write(CheckpointFolder(root), 14, "14", keep=1)  # replaces one, prunes two

    for _ in killed_at_each_change(save):
        folder = CheckpointFolder(root)
        for rollout_id in folder.rollout_ids():
            path = folder.path(rollout_id)
            check_quickly(path, read_meta(path))
            assert (path / "data").read_text() == str(rollout_id)
        assert folder.rollout_ids()  # one is left in every moment
        write(folder, 19, "19", keep=1)
        assert sorted(path.name for path in root.iterdir()) == ["iter_0000019", TRACKER]
        shutil.rmtree(root)
        shutil.copytree(origin, root)
    assert CheckpointFolder(root).rollout_ids() == [14]


@pytest.mark.parametrize(
    "facts",
    [
        {"rollout_id": "../../x"},
        {"sizes": []},
        {"sizes": {"../../../etc/hostname": 1}},
        {"checksums": {"/etc/passwd": "crc32:0"}},
    ],
    ids=str,
)
def test_hostile_facts_are_refused_in_one_sentence(tmp_path, facts):
    folder = CheckpointFolder(tmp_path)
    write(folder, 4)
    file = folder.path(4) / "meta.json"
    known = {"rollout_id": 4, "weight_version": 5, "train_backend": "fsdp"}
    file.write_text(json.dumps({**known, **facts}))
    with pytest.raises(ConfigError, match=r"meta\.json cannot be read"):
        read_meta(folder.path(4))


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = write(folder, 4) or folder.path(4)
    (path / "data").unlink()
    os.mkfifo(path / "data")
    facts = {"rollout_id": 4, "weight_version": 5, "train_backend": "fsdp"}
    hostile = {**facts, "sizes": {"data": 0}, "checksums": {"data": "ffffffff"}}
    (path / "meta.json").write_text(json.dumps(hostile))
    with pytest.raises(ConfigError, match="data is not what was written"):
        check_quickly(path, read_meta(path))
