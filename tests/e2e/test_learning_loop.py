"""Whole runs: what the engine says it sampled is what the trainer computes, whatever the layout."""

from pathlib import Path

import pytest

from tests.e2e import runs
from tests.tiny import make_tiny_checkpoint


def test_trainer_and_engine_agree_on_log_probs(plain_run):
    _check_agreement(plain_run.run_dir)


def test_trainer_and_engine_agree_on_log_probs_at_another_temperature(
    tiny_model, tiny_data, tmp_path
):
    _check_agreement(_run(tiny_model, tiny_data, tmp_path / "run", rollout_temperature=0.7))


def test_colocated_equals_disaggregated(plain_run, tiny_model, tiny_data, tmp_path):
    flags = {**plain_run.flags, "colocate": True, "rollout_num_gpus": None}
    together = _run(tiny_model, tiny_data, tmp_path / "together", **flags)
    assert runs.learning(plain_run.run_dir) == runs.learning(together)
    assert len(runs.learning(together)) == 6


def test_two_engines_and_two_ranks_learn_the_same_as_one(
    plain_run, tiny_model, tiny_data, tmp_path
):
    flags = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "balance_data": True}
    two = _run(tiny_model, tiny_data, tmp_path / "two", **{**plain_run.flags, **flags})
    alone, pair = runs.learning(plain_run.run_dir), runs.learning(two)
    # The first rollout is sampled from identical weights, so it is identical; its gradient is the
    # same sum in another order.
    assert alone[0, "rollout"] == pair[0, "rollout"]
    for name in ("train/loss", "train/grad_norm", "train/pg_loss"):
        assert pair[0, "train"][name] == pytest.approx(alone[0, "train"][name], rel=1e-4, abs=1e-6)
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in runs.metrics(two, "train"))


@pytest.mark.parametrize(
    "family, backend", [("qwen3_next", "fsdp"), ("qwen3_5", "fsdp"), ("qwen3_5_moe", "megatron")]
)
def test_trainer_and_engine_agree_on_models_with_gated_delta_nets(
    family, backend, tiny_data, tmp_path
):
    """Chunked prefill and saved states on one side, packed samples on the other."""
    model = make_tiny_checkpoint(tmp_path / "m", family, weight_scale=2.0)
    flags = {"sglang_chunked_prefill_size": 24, "sglang_page_size": 4, "train_backend": backend}
    if family == "qwen3_5":
        flags |= {"colocate": True, "rollout_num_gpus": None}
    _check_agreement(_run(model, tiny_data, tmp_path / "run", **flags))


def _run(model: Path, data: Path, run_dir: Path, **flags: object) -> Path:
    status, output = runs.run(runs.command(model, data, run_dir, **flags))
    assert status == 0, output
    return run_dir


def _check_agreement(run_dir: Path) -> None:
    trained = runs.metrics(run_dir, "train")
    assert len(trained) == 3
    assert all(0 <= record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    assert all(record["train/grad_norm"] > 0 for record in trained), trained
