"""Engine and trainer by turns on one GPU: whole runs of five rollouts."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.colocate_gpu import Watch, card_memory
from tests.e2e import gates, runs
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def colocated(tmp_path: Path, data: Path, **flags: object) -> list[str]:
    model = make_tiny_checkpoint(tmp_path / "m", weight_scale=2.0, hidden_size=128, head_dim=64)
    shared = {"colocate": True, "rollout_num_gpus": None, "sglang_mem_fraction_static": 0.5}
    sizes = {"rollout_max_response_len": 32, "max_tokens_per_gpu": 2048}
    return runs.command(model, data, tmp_path / "run", **shared, **sizes, **flags)


# bf16 keeps 8 bits: with log-probs of about -6 a difference of a few hundredths is rounding.
@pytest.mark.parametrize(("precision", "gap"), [("bf16", 0.3), ("fp32", 1e-3)])
def test_five_rollouts_take_turns_on_the_card(data: Path, tmp_path: Path, precision, gap):
    words = colocated(tmp_path, data, num_rollout=5, **{precision: True})
    with Watch(card_memory, 0.05) as watch:
        status, output = runs.run(words)
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 5
    assert all(row["train/log_prob_gap_max"] < gap for row in trained), trained
    assert all(row["train/grad_norm"] > 0 for row in trained), trained
    versions = [row.get("perf/weight_version") for row in runs.metrics(tmp_path / "run")]
    assert [v for v in versions if v is not None] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]  # before the first, then one each
    total = torch.cuda.get_device_properties(0).total_memory
    used = [values["card"] for _, values in watch.readings]
    assert max(used) > 0.4 * total  # the engine took what it was given
    assert min(used[len(used) // 2 :]) < 0.3 * total  # and gave it back while the trainer worked


def test_an_engine_killed_in_a_rollout_comes_back_with_the_current_weights(
    data: Path, tmp_path: Path
):
    """The trainer's memory is offloaded then; the new engine gets a KV cache of the same size."""
    run_dir = tmp_path / "run"
    gated = {"custom_generate_function_path": gates.GENERATE, "rollout_health_check_interval": 1}
    words = colocated(tmp_path, data, num_rollout=4, fp32=True, **gated)
    with Watch(card_memory, 0.05) as watch:
        process, gate = runs.start(words), gates.Gate(run_dir)
        gate.wait(process)
        before = len(watch.readings)
        psutil.Process(runs.engine_facts(run_dir)["pid"]).kill()
        gate.open()
        output = runs.finish(process)
    assert process.returncode == 0, output
    assert output.count("engine 0 failed and was started again") == 1
    trained = runs.metrics(run_dir, "train")
    assert [row["rollout_id"] for row in trained] == list(range(4))
    assert all(row["train/log_prob_gap_max"] < 1e-3 for row in trained), trained
    total = torch.cuda.get_device_properties(0).total_memory
    after = [values["card"] for _, values in watch.readings[before:]]
    assert min(after) < 0.3 * total and max(after) > 0.4 * total
