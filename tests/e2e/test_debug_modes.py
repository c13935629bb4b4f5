"""Rollout alone, training alone: a recorded rollout trains exactly as it did in the full run."""

from tests.e2e import runs


def test_training_on_a_recorded_rollout_repeats_it(tiny_model, tiny_data, tmp_path):
    record = str(tmp_path / "rollouts" / "{rollout_id}.pt")
    shared = {"num_rollout": 2}
    live = runs.command(
        tiny_model, tiny_data, tmp_path / "live", save_debug_rollout_data=record, **shared
    )
    again = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "again",
        debug_train_only=True,
        load_debug_rollout_data=record,
        rollout_num_gpus=None,
        **shared,
    )
    for words in (live, again):
        status, output = runs.run(words)
        assert status == 0, output
    first, second = runs.learning(tmp_path / "live"), runs.learning(tmp_path / "again")
    assert first == second
    assert {kind for _, kind in first} == {"rollout", "train"}


def test_rollout_only_generates_and_scores_without_a_trainer(tiny_model, tiny_data, tmp_path):
    words = runs.command(
        tiny_model, tiny_data, tmp_path / "run", debug_rollout_only=True, num_rollout=2
    )
    status, output = runs.run(words)
    assert status == 0, output
    rollouts = runs.metrics(tmp_path / "run", "rollout")
    assert [record["rollout_id"] for record in rollouts] == [0, 1]
    assert not runs.metrics(tmp_path / "run", "train")
