"""`for batch in run`: a loop of the user's own that ends early, in four ways, and goes on from where it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import slime
from tests.e2e import runs, step_script


@pytest.fixture(scope="module", params=["sync", "async"])
def stepped(request, tiny_model, tmp_path_factory):
    """The folder, and what the loop saw until break, error, Ctrl-C and the end."""
    folder = tmp_path_factory.mktemp("steps") / "run"
    options = ["train_async=true"] if request.param == "async" else []
    done = subprocess.run(
        [sys.executable, step_script.__file__, str(tiny_model), str(folder), *options],
        cwd=folder.parent,
        env=runs.environment(forks=True),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_every_way_to_leave_the_loop_saves_what_was_trained(stepped):
    _, (broken, failed, interrupted, ended) = stepped
    assert [row[0] for row in broken["seen"]] == [0, 1, 2]
    assert broken["checkpoints"] == ["iter_0000001"] and broken["raised"] is None
    assert [row[0] for row in failed["seen"]] == [2] and failed["raised"] == "ValueError"
    assert failed["checkpoints"] == ["iter_0000001"]  # nothing was trained on
    assert [row[0] for row in interrupted["seen"]] == [2, 3]
    assert interrupted["raised"] == "KeyboardInterrupt"
    assert interrupted["checkpoints"] == ["iter_0000001", "iter_0000002"]
    assert [row[0] for row in ended["seen"]] == [3] and ended["status"] == 0
    assert ended["checkpoints"][-1] == "iter_0000003"


def test_a_batch_holds_the_rewards_that_its_metrics_average(stepped):
    for result in stepped[1]:
        for _, rewards, mean in result["seen"]:
            assert len(rewards) == 16 and mean == pytest.approx(sum(rewards) / 16)


def test_the_folder_is_that_of_one_complete_run(stepped):
    folder, results = stepped
    run = slime.load_run(folder)
    rows = [row for row in run.metrics if row["rollout_id"] >= 0]
    assert [row["rollout_id"] for row in rows] == [0, 1, 2, 3]
    # What was trained on is what the loop saw last of each rollout.
    means = {number: mean for result in results for number, _, mean in result["seen"]}
    assert [row["rollout/reward_mean"] for row in rows] == [means[number] for number in range(4)]
    assert all("train/loss" in row and "perf/step_time" in row for row in rows)
    assert run.model.is_dir() and (folder / "report.html").exists()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    ends = [event["outcome"] for event in events if event["kind"] == "end"]
    assert ends == ["stopped", "stopped", "stopped", "complete"]


def test_no_process_is_left(stepped):
    folder, _ = stepped
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(folder) not in lines
