"""Whole runs: what the engine says it sampled is what the trainer computes, whatever the layout."""

import pytest

from tests.e2e import runs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_and_engine_agree_on_log_probs(tiny_model, tiny_data, tmp_path, temperature):
    status, output = runs.run(
        runs.command(tiny_model, tiny_data, tmp_path / "run", rollout_temperature=temperature)
    )
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 3
    assert all(0 <= record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    assert all(record["train/grad_norm"] > 0 for record in trained), trained


def test_colocated_equals_disaggregated(tiny_model, tiny_data, tmp_path):
    common = {"sglang_enable_deterministic_inference": True}
    apart = runs.command(tiny_model, tiny_data, tmp_path / "apart", **common)
    together = runs.command(
        tiny_model, tiny_data, tmp_path / "together", colocate=True, rollout_num_gpus=None, **common
    )
    for words in (apart, together):
        status, output = runs.run(words)
        assert status == 0, output
    assert runs.learning(tmp_path / "apart") == runs.learning(tmp_path / "together")
    assert len(runs.learning(tmp_path / "apart")) == 6


def test_two_engines_and_two_ranks_learn_the_same_as_one(tiny_model, tiny_data, tmp_path):
    common = {"sglang_enable_deterministic_inference": True, "num_rollout": 2, "balance_data": True}
    one = runs.command(tiny_model, tiny_data, tmp_path / "one", **common)
    two = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "two",
        actor_num_gpus_per_node=2,
        rollout_num_gpus=2,
        **common,
    )
    for words in (one, two):
        status, output = runs.run(words)
        assert status == 0, output
    alone, pair = runs.learning(tmp_path / "one"), runs.learning(tmp_path / "two")
    # The first rollout is sampled from identical weights, so it is identical; its gradient is the
    # same sum in another order.
    assert alone[0, "rollout"] == pair[0, "rollout"]
    for name in ("train/loss", "train/grad_norm", "train/pg_loss"):
        assert pair[0, "train"][name] == pytest.approx(alone[0, "train"][name], rel=1e-4, abs=1e-6)
    assert all(
        record["train/log_prob_gap_max"] < 1e-4
        for record in runs.metrics(tmp_path / "two", "train")
    )
