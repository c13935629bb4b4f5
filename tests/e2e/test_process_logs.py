"""What the processes of a run said is in its folder, also of one that crashed."""

import json
from pathlib import Path

from tests.e2e import crashes, runs

SECRET = "open-sesame"


def test_logs_of_a_rank_that_crashed(tiny_model, tiny_data, tmp_path):
    words = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "run",
        num_rollout=1,
        loss_type="custom_loss",
        custom_loss_function_path="tests.e2e.crashes.crash",
        train_env_vars=json.dumps({"NCCL_DEBUG": "WARN", "MY_TOKEN": SECRET}),
    )
    status, output = runs.run(words, forked=False)
    assert status not in (0, 2), output
    logs = tmp_path / "run" / "logs"
    trainer = (logs / "trainer_0.log").read_text()
    assert "NCCL_DEBUG=WARN" in trainer.splitlines()[0]  # it reached the rank
    assert "MY_TOKEN=***" in trainer.splitlines()[0]
    for said in ("the loss was asked for", "NCCL WARN", "Segmentation fault", "crashes.py"):
        assert said in trainer
    assert (logs / "rollout.log").stat().st_size and (logs / "engine_0.log").stat().st_size
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in kept if SECRET.encode() in path.read_bytes()]
    assert SECRET not in output


def test_a_trainer_hook_that_raises_is_one_paragraph(tiny_model, tiny_data, tmp_path):
    """It names the flag and the line, without colours; the rank's log has the traceback."""
    words = runs.command(
        tiny_model, tiny_data, tmp_path / "run", num_rollout=1, loss_type="custom_loss",
        custom_loss_function_path="tests.e2e.crashes.wrong_loss",
    )  # fmt: skip
    status, output = runs.run(words)
    assert status == 1, output
    lines = Path(crashes.__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "the line that is told" in line)
    place = f"{crashes.__file__}:{number}"
    flag = "--custom-loss-function-path tests.e2e.crashes.wrong_loss"
    assert f"slime: {flag} failed at {place}" in output and "KeyError: 'my_column'" in output
    assert "Traceback" not in output and "\x1b" not in output, output
    trainer = (tmp_path / "run" / "logs" / "trainer_0.log").read_text()
    assert "Traceback" in trainer and "in wrong_loss" in trainer
