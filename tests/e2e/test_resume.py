"""A run that is killed and started again ends where the unbroken one does, bit for bit."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.runlog.export_folder import ExportInfo, export_info
from tests.e2e import gates, runs
from tests.tiny import make_tiny_checkpoint

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
    forked = phase == "train"  # one of the two with processes that Python starts
    _kill(words, tmp_path / "run", forked=forked)
    half = tmp_path / "run" / "logs" / "engine_0.port.1.tmp"  # as a full disk leaves it
    half.touch()
    status, output = runs.run(words, forked=forked)
    assert status == 0, output
    assert runs.learning(tmp_path / "run") == unbroken
    assert not half.exists()


def _kill(words: list[str], run_dir: Path, *, forked: bool = True) -> None:
    """Start a run with a gate, kill all of it there, and open the gate for the next start."""
    process, gate = runs.start(words, forked=forked), gates.Gate(run_dir)
    gate.wait(process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    gate.open()


# trainer -> model, and flags of the layout
DELTA_NETS = {
    "fsdp": ("qwen3_5", {"colocate": True, "rollout_num_gpus": None}),
    "megatron": ("qwen3_next", {}),
}


@pytest.fixture(scope="module", params=["fsdp", "megatron"])
def delta_net_run(request, tiny_data, tmp_path_factory):
    """A run of a model with gated delta nets that turns the reward up: its flags, model and folder."""
    if request.param == "megatron":
        pytest.importorskip("megatron.core")
    folder, (family, layout) = tmp_path_factory.mktemp("delta_net"), DELTA_NETS[request.param]
    model = make_tiny_checkpoint(folder / "m", family, weight_scale=2.0)
    options = {
        **layout,
        "train_backend": request.param,
        "sglang_enable_deterministic_inference": True,
        "sglang_chunked_prefill_size": 24,
        "sglang_page_size": 4,
        "num_rollout": 10,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 8,
        "global_batch_size": 64,
        "max_tokens_per_gpu": 512,
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "adam_beta2": 0.95,
    }
    written = {"save_hf": folder / "hf", "save": folder / "saved"}
    words = runs.command(model, tiny_data, folder / "run", **options, **written)
    status, output = runs.run(words)
    assert status == 0, output
    return options, model, folder


def test_a_model_with_gated_delta_nets_learns(delta_net_run):
    """No warm-up: every response of a random model has some reward."""
    _, _, folder = delta_net_run
    rewards = [record["rollout/reward_mean"] for record in runs.metrics(folder / "run", "rollout")]
    gaps = [r["train/log_prob_gap_max"] for r in runs.metrics(folder / "run", "train")]
    assert len(rewards) == len(gaps) == 10
    assert rewards[0] < 0.6 and min(rewards[-2:]) > 0.75, rewards
    assert max(gaps) < 1e-4, gaps


def test_killed_run_with_gated_delta_nets_continues_bitwise(delta_net_run, tiny_data, tmp_path):
    options, model, whole = delta_net_run
    save = tmp_path / "saved"
    written = {"save": save, "load": save, "save_interval": 1, "save_hf": tmp_path / "hf"}
    words = runs.command(model, tiny_data, tmp_path / "run", **options, **written, **HOLDS["train"])
    _kill(words, tmp_path / "run")
    status, output = runs.run(words)
    assert status == 0, output
    assert runs.learning(tmp_path / "run") == runs.learning(whole / "run")
    _assert_same_weights(tmp_path / "hf", whole / "hf")


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
    assert f"continuing after rollout {gates.HELD - 1}\n" in output
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
        status, output = runs.run(words, forked=False)
        assert status == 1 and (tmp_path / "plan").read_text() == kills_left, output
        assert int(tracker.read_text()) == ROLLOUTS - 1
        assert export_info(folder / "hf") is None
        assert "slime engine --model-path" not in output
    status, output = runs.run(words, forked=False)
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
