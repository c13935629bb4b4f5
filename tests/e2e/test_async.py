"""Whole asynchronous runs: every rollout trained on once, by weights no further ahead than allowed."""

from __future__ import annotations

import pytest
import torch

from tests.e2e import runs

LORA = {"lora_rank": 4, "lr": 0.01}  # adapters are changed in place under the requests
FULLY = "slime.rollout.fully_async_rollout.generate_rollout"


def trained_indices(folder):
    """Indices of every sample that a batch held, over all rollouts."""
    records = [torch.load(path, weights_only=True) for path in folder.glob("*.pt")]
    return [sample["index"] for record in records for sample in record["samples"]]


def test_the_next_rollout_is_made_while_this_one_is_trained_on(tiny_model, tiny_data, tmp_path):
    run_dir, record = tmp_path / "run", tmp_path / "batches"
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        num_rollout=4,
        eval_interval=2,
        eval_prompt_data=["sums", tiny_data],
        save=tmp_path / "save",
        save_interval=2,
        save_debug_rollout_data=record / "{rollout_id}.pt",
    )
    status, output = runs.run(words, script="train_async.py")
    assert status == 0, output
    rollouts = runs.metrics(run_dir, "rollout")
    assert [r["rollout_id"] for r in rollouts] == [0, 1, 2, 3]
    # The first was made by the weights that trained on it, each later one by those before.
    assert "rollout/staleness_max" not in rollouts[0]
    assert [r["rollout/staleness_max"] for r in rollouts[1:]] == [1, 1, 1]
    assert [r["rollout/staleness_mean"] for r in rollouts[1:]] == [1, 1, 1]
    first, *others = runs.metrics(run_dir, "train")
    assert first["train/log_prob_gap_max"] < 1e-4  # under the same weights
    assert all("train/log_prob_gap_max" not in r for r in others)
    assert all(r["train/stale_log_prob_gap_max"] > 1e-4 for r in others), others
    assert sorted(trained_indices(record)) == list(range(4 * 16))
    assert len(runs.metrics(run_dir, "train")) == 4
    again = runs.command(
        tiny_model, tiny_data, run_dir, num_rollout=6, load=tmp_path / "save", save=tmp_path / "save",
        save_debug_rollout_data=record / "{rollout_id}.pt",
    )  # fmt: skip
    status, output = runs.run(again, script="train_async.py")
    assert status == 0, output
    assert sorted(trained_indices(record)) == list(range(6 * 16))


@pytest.mark.parametrize(
    ("script", "lora"), [("train.py", {}), ("train_async.py", {}), ("train_async.py", LORA)]
)
def test_weights_swap_while_requests_are_under_way(tiny_model, tiny_data, tmp_path, script, lora):
    run_dir, record = tmp_path / "run", tmp_path / "batches"
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        num_rollout=5,
        rollout_function_path=FULLY,
        max_weight_staleness=2,
        over_sampling_batch_size=8,
        save_debug_rollout_data=record / "{rollout_id}.pt",
        rollout_max_response_len=96,
        max_tokens_per_gpu=512,
        eval_interval=5,
        eval_prompt_data=["sums", tiny_data],
        **lora,
    )
    status, output = runs.run(words, script=script)
    assert status == 0, output
    rollouts = runs.metrics(run_dir, "rollout")
    assert len(rollouts) == 5
    # At most 2 in the loss: whatever is older is masked.
    assert any(r.get("rollout/staleness_max", 0) >= 1 for r in rollouts)
    assert all(
        r.get("rollout/staleness_max", 0) <= 2 or r["rollout/masked_stale_tokens"] for r in rollouts
    )
    indices = trained_indices(record)
    assert len(indices) == len(set(indices)) == 5 * 16
    assert runs.metrics(run_dir, "eval")
    assert all("train/loss" in record for record in runs.metrics(run_dir, "train"))


def test_colocation_is_refused_with_what_to_do(tiny_model, tiny_data, tmp_path):
    words = runs.command(tiny_model, tiny_data, tmp_path / "run", colocate=True)
    status, output = runs.run(words, script="train_async.py")
    assert status == 2 and "remove --colocate" in output
    words = runs.command(
        tiny_model, tiny_data, tmp_path / "run", colocate=True, rollout_function_path=FULLY
    )
    status, output = runs.run(words)
    assert status == 2 and "remove --colocate" in output and FULLY in output
