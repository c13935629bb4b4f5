"""A run that is killed and started again ends where the unbroken one does, bit for bit."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from slime.runlog.export_folder import ExportInfo, export_info
from tests.e2e import gates, runs

ROLLOUTS = 5


def flags(tmp_path, name: str, tiny_data) -> dict:
    save = tmp_path / name / "checkpoints"
    return {
        "sglang_enable_deterministic_inference": True,
        "num_rollout": ROLLOUTS,
        "save": save,
        "load": save,
        "save_interval": 1,
        "save_total_limit": 2,
        "eval_interval": 2,
        "eval_prompt_data": ["held", tiny_data],
        "lr_decay_style": "linear",
        "lr_warmup_iters": 2,
    }


@pytest.fixture(scope="module")
def unbroken_folder(tiny_model, tiny_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    options = {**flags(folder, "run", tiny_data), "save_hf": folder / "hf_{rollout_id}"}
    status, output = runs.run(runs.command(tiny_model, tiny_data, folder / "run", **options))
    assert status == 0, output
    return folder


@pytest.fixture(scope="module")
def unbroken(unbroken_folder):
    return runs.learning(unbroken_folder / "run")


def test_an_export_with_a_number_in_its_name_comes_with_each_checkpoint(unbroken_folder):
    written = {file.parent.name for file in unbroken_folder.glob("hf_*/config.json")}
    assert written == {f"hf_{rollout}" for rollout in range(ROLLOUTS)}


HOLDS = {
    "rollout": {"custom_generate_function_path": gates.GENERATE},
    "train": {"rollout_data_postprocess_path": gates.TRAIN},
}


@pytest.mark.parametrize("phase", HOLDS)
def test_killed_run_continues_bitwise(tiny_model, tiny_data, tmp_path, unbroken, phase):
    options = {**flags(tmp_path, "run", tiny_data), **HOLDS[phase]}
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", **options)
    process, gate = runs.start(words), gates.Gate(tmp_path / "run")
    gate.wait(process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    gate.open()
    half = tmp_path / "run" / "logs" / "engine_0.port.1.tmp"  # as a full disk leaves it
    half.touch()
    status, output = runs.run(words)
    assert status == 0, output
    assert runs.learning(tmp_path / "run") == unbroken
    assert not half.exists()


def test_sigterm_saves_and_the_rest_is_continued_bitwise(tiny_model, tiny_data, tmp_path, unbroken):
    options = {**flags(tmp_path, "run", tiny_data), "save_interval": None, **HOLDS["rollout"]}
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", **options)
    process, gate = runs.start(words), gates.Gate(tmp_path / "run")
    gate.wait(process)
    process.send_signal(signal.SIGTERM)
    output = runs.finish(process)
    assert process.returncode == 128 + signal.SIGTERM, output
    saved = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(saved.read_text()) == gates.HELD - 1, output
    gate.open()
    status, output = runs.run(words)
    assert status == 0, output
    assert runs.learning(tmp_path / "run") == unbroken


_KILLER = """
import os, pathlib, signal, sys

plan = pathlib.Path(__file__).parent / "plan"

def watch(event, values):
    if event in ("os.mkdir", "os.rename") and str(values[0]).endswith("hf.slime-tmp"):
        first, *rest = plan.read_text().split() or [None]
        if event == first:
            plan.write_text(" ".join(rest))
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
"""


def test_killed_between_the_last_checkpoint_and_its_export_the_next_start_exports(
    tiny_model, tiny_data, tmp_path, unbroken_folder, monkeypatch
):
    """The rank that exports is killed before it writes anything, then before it renames what it wrote."""
    (tmp_path / "sitecustomize.py").write_text(_KILLER)
    (tmp_path / "plan").write_text("os.mkdir os.rename")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    folder = tmp_path / "run"
    options = {**flags(tmp_path, "run", tiny_data), "save_hf": folder / "hf"}
    words = runs.command(tiny_model, tiny_data, folder, **options)
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    for kills_left in ("os.rename", ""):
        status, output = runs.run(words)
        assert status == 1 and (tmp_path / "plan").read_text() == kills_left, output
        assert int(tracker.read_text()) == ROLLOUTS - 1
        assert export_info(folder / "hf") is None
        assert "slime engine --model-path" not in output
    status, output = runs.run(words)
    assert status == 0, output
    expected = ExportInfo(rollout_id=ROLLOUTS - 1, run_dir=str(folder.resolve()))
    assert export_info(folder / "hf") == expected
    assert f"slime engine --model-path {folder / 'hf'}" in output
    _assert_same_weights(folder / "hf", unbroken_folder / f"hf_{ROLLOUTS - 1}")
    assert not list(folder.glob("hf.*"))


def _assert_same_weights(path, other):
    ours, theirs = (_weights(folder) for folder in (path, other))
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def _weights(folder):
    files = (load_file(file) for file in folder.glob("*.safetensors"))
    return {name: tensor for tensors in files for name, tensor in tensors.items()}
