"""Exports of --save-hf: complete under their name or not there, whatever moment the writer is killed at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.runlog.export_folder import (
    MARKER,
    ExportInfo,
    export_info,
    mark_outdated,
    new_export,
    recover_export,
)
from slime.weights.hf_folder import write_hf_folder
from tests.killed import killed_at_each_change


def export(path: Path, rollout_id: int) -> None:
    with new_export(path, ExportInfo(rollout_id=rollout_id, run_dir="/runs/a")) as folder:
        (folder / "config.json").write_text(f'{{"rollout": {rollout_id}}}')
        (folder / "model.safetensors").write_text(str(rollout_id))


def holds(path: Path) -> int | None:
    """The rollout whose weights are there; every file of the folder must be of the same one."""
    info = export_info(path)
    if info is None:
        return None
    assert (path / "config.json").read_text() == f'{{"rollout": {info.rollout_id}}}'
    assert (path / "model.safetensors").read_text() == str(info.rollout_id)
    return info.rollout_id


def test_an_export_says_what_it_holds_and_who_made_it(tmp_path):
    assert export_info(tmp_path / "hf") is None
    export(tmp_path / "hf", 9)
    assert export_info(tmp_path / "hf") == ExportInfo(rollout_id=9, run_dir="/runs/a")
    export(tmp_path / "hf", 19)
    assert holds(tmp_path / "hf") == 19
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("before", [None, 9])
def test_killed_at_any_moment_it_is_the_old_export_or_the_new_one(tmp_path, before):
    """And the next start, which exports again where the new one is missing, leaves nothing else."""
    origin, root = tmp_path / "origin", tmp_path / "work"
    origin.mkdir()
    if before is not None:
        export(origin / "hf", before)
    shutil.copytree(origin, root)
    seen = set()
    for _ in killed_at_each_change(export, root / "hf", 19):
        if (root / "hf").exists():  # as a reader may find it
            assert holds(root / "hf") in (before, 19)
        recover_export(root / "hf")
        seen.add(holds(root / "hf"))
        assert holds(root / "hf") in (before, 19)
        if holds(root / "hf") != 19:
            export(root / "hf", 19)
        assert holds(root / "hf") == 19
        assert [path.name for path in root.iterdir()] == ["hf"]
        shutil.rmtree(root)
        shutil.copytree(origin, root)
    assert seen == {before, 19}  # kills before the marker, and behind it
    assert holds(root / "hf") == 19


def test_killed_while_recovering_it_is_recovered_the_next_time(tmp_path):
    origin = tmp_path / "origin"
    export(origin / "hf", 9)
    (origin / "hf").rename(origin / "hf.slime-replacing")
    export(origin / "new", 19)
    (origin / "new").rename(origin / "hf.slime-tmp")
    root = tmp_path / "work"
    shutil.copytree(origin, root)
    for _ in killed_at_each_change(recover_export, root / "hf"):
        recover_export(root / "hf")
        assert holds(root / "hf") == 19 and len(list(root.iterdir())) == 1
        shutil.rmtree(root)
        shutil.copytree(origin, root)
    assert holds(root / "hf") == 19


def test_a_folder_that_is_not_ours_is_kept_under_another_name(tmp_path):
    for number in range(2):
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "notes.txt").write_text(f"mine {number}")
        export(tmp_path / "hf", 9)
        assert holds(tmp_path / "hf") == 9
    kept = {path.name: (path / "notes.txt").read_text() for path in tmp_path.glob("hf.*")}
    assert kept == {"hf.previous": "mine 0", "hf.previous-1": "mine 1"}


def test_an_empty_folder_and_a_link_are_replaced_in_their_place(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    export(tmp_path / "link", 3)
    assert (tmp_path / "link").is_symlink() and holds(tmp_path / "real") == 3
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


def test_an_export_of_a_rollout_that_is_trained_again_no_longer_counts(tmp_path):
    export(tmp_path / "hf", 9)
    mark_outdated(tmp_path / "hf", 10)
    assert holds(tmp_path / "hf") == 9
    mark_outdated(tmp_path / "hf", 9)
    assert export_info(tmp_path / "hf") == ExportInfo(rollout_id=None, run_dir="/runs/a")
    export(tmp_path / "hf", 9)
    assert holds(tmp_path / "hf") == 9


def test_a_failed_export_leaves_the_old_one_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"torch_dtype": "float32", "quantization_config": {}}')
    (source / MARKER).write_text('{"rollout_id": 77, "run_dir": "/runs/other"}')

    def write(value: float, *, fails: bool = False) -> None:
        def buckets():
            yield [("a", torch.full((2,), value))]
            if fails:
                raise OSError("No space left on device")

        info = ExportInfo(rollout_id=int(value), run_dir="/runs/a")
        path = str(tmp_path / "hf")
        write_hf_folder(path, str(source), torch.float32, buckets(), writes=True, info=info)

    write(1.0)
    with pytest.raises(OSError, match="No space"):
        write(2.0, fails=True)
    assert export_info(tmp_path / "hf").rollout_id == 1
    tensors = load_file(tmp_path / "hf" / "model-00001.safetensors")
    assert torch.equal(tensors["a"], torch.ones(2))
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "source"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"dtype": "float32"}


def test_the_marker_of_the_origin_is_not_taken_for_the_exports(tmp_path):
    """--hf-checkpoint may be an export itself; half a copy of it must not look complete."""
    source, path = tmp_path / "source", tmp_path / "hf"
    export(source, 77)

    def write() -> None:
        buckets = iter([[("a", torch.ones(2))]])
        write_hf_folder(str(path), str(source), torch.float32, buckets, writes=True)

    for _ in killed_at_each_change(write):
        recover_export(path)
        info = export_info(path)
        assert info is None or info == ExportInfo()
        shutil.rmtree(path, ignore_errors=True)
    assert export_info(path) == ExportInfo()


def test_folders_of_the_user_beside_an_export_are_left_alone(tmp_path):
    for name in ("hf.tmp", "hf.replacing", "hf.previous"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text(name)
    for rollout_id in (1, 2):
        export(tmp_path / "hf", rollout_id)
    assert holds(tmp_path / "hf") == 2
    for name in ("hf.tmp", "hf.replacing", "hf.previous"):
        assert (tmp_path / name / "precious").read_text() == name
