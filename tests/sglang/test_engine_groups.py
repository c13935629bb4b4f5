"""A policy and a frozen judge of --sglang-config, both served by the real SGLang."""

from __future__ import annotations

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.e2e import runs
from tests.e2e.test_engine_groups import log_probs
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.timeout(1800)  # a start of a server takes minutes on busy cores


def test_a_frozen_judge_keeps_its_weights_while_the_policy_gets_new_ones(model, data, tmp_path):
    judge = make_tiny_checkpoint(tmp_path / "judge", seed=7, weight_scale=2.0)
    group = {"worker_type": "regular", "num_gpus": 1}
    models = [
        {
            "name": "policy",
            "server_groups": [{**group, "overrides": {"max_running_requests": 5}}],
        },
        {"name": "judge", "model_path": str(judge), "server_groups": [group]},
    ]
    (tmp_path / "engines.yaml").write_text(yaml.safe_dump({"sglang": models}))
    words = runs.command(
        model,
        data,
        tmp_path / "run",
        num_rollout=2,
        rollout_engine="sglang",
        rollout_num_gpus=2,
        sglang_config=tmp_path / "engines.yaml",
        custom_rm_path="tests.e2e.judge.score",
        save_debug_rollout_data=tmp_path / "samples" / "{rollout_id}.pt",
    )
    status, output = runs.run(words, timeout=1200)
    assert status == 0, output
    records = runs.metrics(tmp_path / "run", "train")
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in records), records
    plain = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
    labels = set()
    for rollout_id in range(2):
        rows = torch.load(tmp_path / "samples" / f"{rollout_id}.pt", weights_only=True)["samples"]
        for row in rows:
            facts = row["metadata"]["judge"]
            found, expected = torch.tensor(facts["log_probs"]), log_probs(plain, row["tokens"])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            labels.add(facts["version"])
        assert {v for row in rows for v in row["weight_versions"]} == {rollout_id + 1}
    assert len(labels) == 1  # the one it was started with
    log = (tmp_path / "run" / "logs" / "engine_0.log").read_text()
    assert "max_running_requests=5" in log
