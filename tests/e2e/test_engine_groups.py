"""Two models and three engines of --sglang-config: a policy in two groups, and a frozen judge."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.e2e import gates, runs
from tests.tiny import make_tiny_checkpoint

JUDGE = 2  # the number of its engine


def config(path: Path, judge: Path) -> Path:
    group = {"worker_type": "regular", "num_gpus": 1}
    odd = {**group, "overrides": {"page_size": 32, "max_running_requests": 3}}
    models = [
        {"name": "policy", "server_groups": [group, odd]},
        {"name": "judge", "model_path": str(judge), "server_groups": [group]},
    ]
    path.write_text(yaml.safe_dump({"sglang": models}))
    return path


def log_probs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Of all tokens but the first, by the plain model."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("colocate", [False, True])
def test_a_policy_in_two_groups_is_trained_with_a_frozen_judge_that_dies_once(
    tiny_model, tiny_data, tmp_path, colocate
):
    """The judge computes with the weights of its folder all the time; the policy with those just trained."""
    judge, run_dir = make_tiny_checkpoint(tmp_path / "judge", "llama", seed=7), tmp_path / "run"
    layout = {"colocate": True, "actor_num_gpus_per_node": 3} if colocate else {}
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        **{"num_rollout": 4, "rollout_batch_size": 6, "global_batch_size": 24, **layout},
        rollout_num_gpus=None if colocate else 3,
        sglang_config=config(tmp_path / "engines.yaml", judge),
        rollout_health_check_interval=1,
        custom_generate_function_path=gates.GENERATE,
        custom_rm_path="tests.e2e.judge.score",
        save_debug_rollout_data=tmp_path / "samples" / "{rollout_id}.pt",
    )
    process, gate = runs.start(words), gates.Gate(run_dir)
    gate.wait(process)
    before = [runs.engine_facts(run_dir, engine) for engine in range(3)]
    psutil.Process(before[JUDGE]["pid"]).kill()
    runs.wait_for(lambda: restarted(run_dir, before[JUDGE]), process)
    gate.open()
    output = runs.finish(process)
    assert process.returncode == 0, output
    assert output.count(f"engine {JUDGE} failed and was started again") == 1
    assert [runs.engine_facts(run_dir, engine) for engine in range(2)] == before[:2]
    check_judge(judge, tmp_path / "samples")
    records = runs.metrics(run_dir, "train")
    assert [record["rollout_id"] for record in records] == list(range(4))
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in records), records
    log = (run_dir / "logs" / "trainer_0.log").read_text()
    assert set(re.findall(r"(\d+) engines?", log)) == {"2"}, log  # the judge is sent nothing


def restarted(run_dir: Path, before: dict) -> bool:
    try:
        return runs.engine_facts(run_dir, JUDGE) != before
    except (OSError, ValueError):  # the new one has not written it so far
        return False


def check_judge(folder: Path, samples: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    versions = []
    for rollout_id in range(4):
        rows = torch.load(samples / f"{rollout_id}.pt", weights_only=True)["samples"]
        for row in rows:
            facts = row["metadata"]["judge"]
            expected = log_probs(model, row["tokens"])
            torch.testing.assert_close(
                torch.tensor(facts["log_probs"]), expected, atol=1e-4, rtol=0
            )
            assert (facts["version"], facts["policy_engines"]) == ("default", 2)
        versions.append({version for row in rows for version in row["weight_versions"]})
    assert versions == [{rollout_id + 1} for rollout_id in range(4)], versions
