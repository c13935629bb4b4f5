"""An engine that dies is started again, given the current weights, and no sample is lost."""

import psutil
import pytest

from tests.e2e import gates, runs

# Colocated trainers sleep during a rollout: they wake for the new engine, and all engines give memory away.
SHARED = {"colocate": True, "rollout_num_gpus": None}


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "colocated"])
def test_a_killed_engine_comes_back_with_the_current_weights(
    tiny_model, tiny_data, tmp_path, shares
):
    run_dir = tmp_path / "run"
    places = {**SHARED, "actor_num_gpus_per_node": 2} if shares else {"rollout_num_gpus": 2}
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        num_rollout=5,
        rollout_health_check_interval=1,
        custom_generate_function_path=gates.GENERATE,
        custom_rm_path=gates.SCORE,
        **places,
    )
    process, gate = runs.start(words), gates.Gate(run_dir)
    gate.wait(process)
    victim = psutil.Process(runs.engine_facts(run_dir)["pid"])
    victim.suspend()
    gate.open()
    # The first request goes to the first of two idle engines: one that was answered by the other
    # engine tells that the stopped one has some, which are lost now.
    gate.wait_for_score(process)
    victim.kill()
    check_all_was_trained(process, run_dir, num_rollout=5)
    rollouts = runs.metrics(run_dir, "rollout")
    assert all(record["rollout/samples"] == 16 for record in rollouts)
    assert not any(record.get("rollout/failed") for record in rollouts)


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "colocated"])
def test_the_only_engine_comes_back_with_the_current_weights(
    tiny_model, tiny_data, tmp_path, shares
):
    """The rollout that waits for it can be made by none with older ones."""
    run_dir = tmp_path / "run"
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        num_rollout=4,
        rollout_health_check_interval=1,
        custom_generate_function_path=gates.GENERATE,
        **(SHARED if shares else {}),
    )
    process, gate = runs.start(words), gates.Gate(run_dir)
    gate.wait(process)
    psutil.Process(runs.engine_facts(run_dir)["pid"]).kill()
    gate.open()
    check_all_was_trained(process, run_dir, num_rollout=4)


def check_all_was_trained(process, run_dir, *, num_rollout):
    output = runs.finish(process)
    assert process.returncode == 0, output
    assert "engine 0 failed and was started again" in output
    trained = runs.metrics(run_dir, "train")
    assert [record["rollout_id"] for record in trained] == list(range(num_rollout))
    # Had it generated with the weights it was started from, its log-probs would be off.
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
