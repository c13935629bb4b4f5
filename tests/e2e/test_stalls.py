"""A run that gets no further says where every process is, who the others wait for, and ends."""

import re

import psutil

from tests.e2e import gates, runs

TWO_RANKS = {"actor_num_gpus_per_node": 2, "save_interval": 1, "num_rollout": 4}


def test_a_rank_that_oversleeps_is_named_with_its_stack(tiny_model, tiny_data, tmp_path):
    words = _command(tiny_model, tiny_data, tmp_path, "oversleep")
    status, output = runs.run(words, forked=False)
    assert status == 1, output
    assert "train has taken more than 30 s" in output
    assert re.search(r"The others wait for trainer rank 1 \(pid \d+ on [\d.]+\)\.", output), output
    assert "in oversleep: time.sleep(600)" in output
    _check_end(output, tmp_path)


def test_a_stopped_rank_is_named(tiny_model, tiny_data, tmp_path):
    process = runs.start(_command(tiny_model, tiny_data, tmp_path, "tell_pid", num_rollout=400))
    saved = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    runs.wait_for(saved.exists, process)
    rank = psutil.Process(int((tmp_path / "run" / "rank_1.pid").read_text()))
    rank.suspend()
    output = runs.finish(process)
    assert process.returncode == 1, output
    said = rf"trainer rank 1 \(pid {rank.pid} on [\d.]+\) is stopped \(kill -CONT {rank.pid} "
    assert re.search(said, output), output
    assert "The others wait for trainer rank 1" in output
    _check_end(output, tmp_path)
    runs.wait_until_gone(rank)


def test_a_hung_engine_is_replaced(tiny_model, tiny_data, tmp_path):
    run_dir = tmp_path / "run"
    words = runs.command(
        tiny_model,
        tiny_data,
        run_dir,
        num_rollout=4,
        custom_generate_function_path=gates.GENERATE,
        rollout_health_check_interval=1,
        rollout_health_check_timeout=5,
    )
    process, gate = runs.start(words), gates.Gate(run_dir)
    gate.wait(process)
    engine = psutil.Process(runs.engine_facts(run_dir)["pid"])
    engine.suspend()
    gate.open()
    output = runs.finish(process)
    assert process.returncode == 0, output
    assert "engine 0 failed and was started again" in output
    assert len(runs.metrics(run_dir, "train")) == 4
    runs.wait_until_gone(engine)


def _command(tiny_model, tiny_data, tmp_path, hook: str, **overrides) -> list[str]:
    return runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "run",
        **{
            **TWO_RANKS,
            "save": tmp_path / "saved",
            "rollout_data_postprocess_path": f"tests.e2e.stall_hooks.{hook}",
            "phase_timeout_minutes": '{"train": 0.5, "update_weights": 0.5, "save": 0.5}',
            **overrides,
        },
    )


def _check_end(output: str, tmp_path) -> None:
    assert f"continue with the same command and --load {tmp_path / 'saved'}" in output
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").exists()
    assert "Traceback" not in output, output
