"""The comparison finds what it is there to find: each test changes one thing of a good run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.chaos.compare import differences
from tests.chaos.modes import Folders, Mode

MODE = Mode(name="small", num_rollout=2)
LOOSE = Mode(name="loose", num_rollout=2, bitwise=False)


def write_run(root: Path) -> Folders:
    """What a run of two rollouts of four groups of four leaves; a fifth group of each was rejected."""
    folders = Folders(root=root)
    for folder in (folders.run_dir, folders.hf, folders.samples, folders.ledger):
        folder.mkdir(parents=True)
    save_file({"w": torch.arange(6.0), "b": torch.zeros(2)}, folders.hf / "model.safetensors")
    (folders.hf / "config.json").write_text("{}")
    last = folders.checkpoints / "iter_0000001"
    last.mkdir(parents=True)
    (last / "__0_0.distcp").write_bytes(bytes(range(100)))
    (last / "meta.json").write_text(json.dumps({"rollout_id": 1}))
    state = {"next_group_index": 11, "in_flight": [], "buffer": [[{"group_index": 10}]]}
    (last / "rollout.json").write_text(json.dumps(state))
    (folders.checkpoints / "latest_checkpointed_iteration.txt").write_text("1\n")
    for rollout_id in range(2):
        write_rollout(folders, rollout_id)
    return folders


def write_rollout(folders: Folders, rollout_id: int) -> None:
    groups = range(5 * rollout_id, 5 * rollout_id + 5)
    samples = [
        {"index": 4 * group + i, "tokens": [group, i], "rollout_log_probs": [-0.5 * i]}
        for group in groups
        if group % 5 < 4
        for i in range(4)
    ]
    torch.save({"samples": samples}, folders.samples / f"{rollout_id}.pt")
    record = [[group, f"prompt {group}", 4] for group in groups]
    (folders.ledger / f"{rollout_id}.json").write_text(json.dumps(record))
    with (folders.run_dir / "metrics.jsonl").open("a") as file:
        for kind in ("rollout", "train", "eval"):
            numbers = {"rollout_id": rollout_id, "kind": kind, f"{kind}/x": 0.25, "time": 1.0}
            file.write(json.dumps(numbers) + "\n")
    with (folders.run_dir / "samples.jsonl").open("a") as file:
        for kind in ("rollout", "eval/held"):
            file.write(json.dumps({"rollout_id": rollout_id, "kind": kind}) + "\n")


@pytest.fixture
def reference(tmp_path):
    return write_run(tmp_path / "reference")


@pytest.fixture
def found(tmp_path, reference):
    shutil.copytree(reference.root, tmp_path / "found")
    return Folders(root=tmp_path / "found")


def edit_samples(folders: Folders, edit) -> None:
    path = folders.samples / "1.pt"
    record = torch.load(path, weights_only=True)
    edit(record["samples"])
    torch.save(record, path)


def edit_json(path: Path, edit) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_equal_runs_are_equal(found, reference):
    assert differences(MODE, found, reference) == []


def test_times_and_paths_may_differ(found, reference):
    file = found.run_dir / "metrics.jsonl"
    file.write_text(file.read_text().replace('"time": 1.0', '"time": 2.0'))
    (found.checkpoints / "iter_0000001" / "meta.json").write_text("{}")
    assert differences(MODE, found, reference) == []


def test_a_weight_that_changed_in_its_last_bit(found, reference):
    weights = torch.arange(6.0)
    weights[3] = torch.nextafter(weights[3], torch.tensor(9.0))
    save_file({"w": weights, "b": torch.zeros(2)}, found.hf / "model.safetensors")
    assert differences(MODE, found, reference) == ["HF weights differ: w"]


def test_a_sign_of_zero_counts(found, reference):
    save_file({"w": torch.arange(6.0), "b": -torch.zeros(2)}, found.hf / "model.safetensors")
    assert differences(MODE, found, reference) == ["HF weights differ: b"]


def test_an_export_without_weights(found, reference):
    (found.hf / "model.safetensors").unlink()
    assert "hf has no weights" in differences(LOOSE, found, reference)


def test_a_byte_of_the_checkpoint(found, reference):
    file = found.checkpoints / "iter_0000001" / "__0_0.distcp"
    file.write_bytes(bytes([1, *range(1, 100)]))
    assert differences(MODE, found, reference) == ["files of iter_0000001 differ: __0_0.distcp"]


def test_a_checkpoint_of_an_earlier_rollout(found, reference):
    (found.checkpoints / "iter_0000001").rename(found.checkpoints / "iter_0000000")
    assert "the last checkpoint is iter_0000000" in differences(LOOSE, found, reference)[0]


def test_a_number_of_the_metrics(found, reference):
    file = found.run_dir / "metrics.jsonl"
    file.write_text(file.read_text().replace('"train/x": 0.25', '"train/x": 0.5', 1))
    [line] = differences(MODE, found, reference)
    assert line == "metrics of rollout 0 (train) differ: train/x"


@pytest.mark.parametrize("mode", [MODE, LOOSE], ids=["bitwise", "loose"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_line_twice_or_missing(found, reference, mode, name):
    file = found.run_dir / name
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines, lines[-1]]))
    assert f"{name}: number of lines" in differences(mode, found, reference)[0]
    file.write_text("".join(lines[:-1]))
    assert f"{name}: number of lines" in differences(mode, found, reference)[0]


@pytest.mark.parametrize("mode", [MODE, LOOSE], ids=["bitwise", "loose"])
def test_a_missing_sample(found, reference, mode):
    edit_samples(found, lambda samples: samples.pop())
    assert any("31 samples were trained on" in line for line in differences(mode, found, reference))


def test_a_sample_trained_on_twice(found, reference):
    edit_samples(found, lambda samples: samples[0].update(index=2))
    assert "samples [2] were trained on more than once" in differences(LOOSE, found, reference)


def test_a_log_prob_of_one_sample(found, reference):
    edit_samples(found, lambda samples: samples[3].update(rollout_log_probs=[-1.4]))
    assert "rollout 1, sample 23: rollout_log_probs differ" in differences(MODE, found, reference)


def test_a_rejected_group_that_vanished(found, reference):
    edit_json(found.ledger / "0.json", lambda groups: groups.pop())
    [line] = differences(LOOSE, found, reference)
    assert line == "ledger: groups [4] are neither trained on, rejected nor waiting"


def test_a_waiting_group_that_vanished(found, reference):
    state = found.checkpoints / "iter_0000001" / "rollout.json"
    edit_json(state, lambda content: content.update(buffer=[]))
    [line] = differences(LOOSE, found, reference)
    assert line == "ledger: groups [10] are neither trained on, rejected nor waiting"


def test_a_group_used_twice(found, reference):
    edit_json(found.ledger / "1.json", lambda groups: groups.append([0, "prompt 0", 4]))
    assert "ledger: groups [0] were used more than once" in differences(LOOSE, found, reference)


def test_a_group_with_another_prompt(found, reference):
    edit_json(found.ledger / "1.json", lambda groups: groups[0].__setitem__(1, "prompt 3"))
    assert "ledger: groups [5] have another prompt" in differences(LOOSE, found, reference)


def test_a_rollout_that_was_never_generated(found, reference):
    (found.ledger / "1.json").unlink()
    assert differences(LOOSE, found, reference) == ["ledger: rollout 1 was never generated"]
