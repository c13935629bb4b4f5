"""A run that breaks in a rollout, is continued, found complete, and repeated elsewhere."""

from __future__ import annotations

from pathlib import Path

from tests.e2e import failing_rollout, runs


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "logs" not in file.parts
    }


def test_an_error_in_a_rollout_loses_nothing_and_a_repetition_writes_elsewhere(
    tiny_model, tiny_data, tmp_path
):
    first, save = tmp_path / "first", tmp_path / "first" / "checkpoints"
    words = runs.command(
        tiny_model,
        tiny_data,
        first,
        num_rollout=3,
        rollout_function_path="tests.e2e.failing_rollout.generate_rollout",
        save=save,
        load=save,
    )
    status, output = runs.run(words)
    assert status == 1, output
    done = failing_rollout.FAILING - 1
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == str(done)
    advice = (
        f"The checkpoint after rollout {done} is in {save}: the same command continues from it."
    )
    assert output.rstrip().endswith(advice), output
    assert "reset by peer" in output and "S3CRET" not in output

    status, output = runs.run(words)
    assert status == 0, output
    assert [r["rollout_id"] for r in runs.metrics(first, "train")] == [0, 1, 2]

    log = first / "logs" / "rollout.log"
    written = log.stat().st_mtime_ns
    status, output = runs.run(words)
    assert status == 0 and "nothing is left to train" in output, output
    assert not (first / "attempt_1").exists()
    assert log.stat().st_mtime_ns == written  # no process was started

    before = contents(first)
    second = tmp_path / "second"
    config = [
        "--config",
        str(first / "config.yaml"),
        "--run-dir",
        str(second),
        "--num-rollout",
        "1",
    ]
    status, output = runs.run([*config, "--debug-rollout-only"])
    assert status == 0, output
    assert contents(first) == before
    assert len((second / "samples.jsonl").read_text().splitlines()) == 8
    assert "1 rollout (slime engine)" in output
