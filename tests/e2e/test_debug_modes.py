"""Rollout alone, training alone: a recorded rollout trains exactly as it did in the full run."""

import gzip
import json

import pytest
import torch

from tests.e2e import runs


def test_training_on_a_recorded_rollout_repeats_it(plain_run, tiny_model, tiny_data, tmp_path):
    again = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "again",
        debug_train_only=True,
        load_debug_rollout_data=plain_run.rollouts,
        rollout_num_gpus=None,
        **plain_run.flags,
    )
    status, output = runs.run(again)
    assert status == 0, output
    first, second = runs.learning(plain_run.run_dir), runs.learning(tmp_path / "again")
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


def test_a_run_that_can_learn_nothing_says_so(tiny_model, tiny_data, tmp_path):
    """Once, on the console and in the report: a constant reward, and two prompts for four groups."""
    words = runs.command(
        tiny_model, f"{tiny_data}@[0:2]", tmp_path / "run", debug_rollout_only=True, num_rollout=6,
        custom_rm_path="tests.e2e.rewards.constant",
    )  # fmt: skip
    status, output = runs.run(words)
    assert status == 0, output
    report = (tmp_path / "run" / "report.html").read_text()
    for sentence, rollout in (
        ("The 4 groups of rollout 0 have 2 different prompts", 1),
        ("Each of 80 samples since rollout 0 has the reward 0.500", 5),
    ):
        before, after = output.split(f"{sentence}")
        assert f"rollout {rollout}/6" in before and f"rollout {rollout + 1}/6" in after, output
    assert "All rewards are equal." in report and "Prompts repeat within a rollout." in report


def test_training_rows_and_traces_can_be_kept(tiny_model, tiny_data, tmp_path):
    words = runs.command(
        tiny_model,
        tiny_data,
        tmp_path / "run",
        num_rollout=2,
        num_steps_per_rollout=2,
        global_batch_size=8,
        save_debug_train_data=tmp_path / "rows" / "{rollout_id}_{rank}.pt",
        profile_target=["train_log_probs", "train_actor"],
        eval_interval=2,
        eval_function_path="tests.e2e.rewards.evaluate",
    )
    status, output = runs.run(words)
    assert status == 0, output
    evaluated = runs.metrics(tmp_path / "run", "eval")  # by the function alone, without a dataset
    assert [(e["rollout_id"], e["eval/mine/reward"]) for e in evaluated] == [(-1, 0.5), (1, 0.5)]
    for rollout_id in range(2):
        rows = torch.load(tmp_path / "rows" / f"{rollout_id}_0.pt", weights_only=True)
        assert rows["rollout_id"] == rollout_id and len(rows["tokens"]) == 16
        groups, raw = rows["group_indices"], rows["raw_rewards"]
        for row, advantages in enumerate(rows["advantages"]):
            group = raw[groups == groups[row]]
            expected = (raw[row] - group.mean()) / (group.std() + 1e-6)
            assert advantages == pytest.approx([expected.item()] * len(advantages), abs=1e-3)
        assert all(
            len(o) == n for o, n in zip(rows["old_log_probs"], rows["response_lens"], strict=True)
        )
        assert sorted(i for step in rows["steps"] for part in step for i in part) == list(range(16))
    traces = sorted((tmp_path / "run" / "profile").iterdir())
    assert [t.name for t in traces] == [
        "train_actor_rollout1_rank0.json.gz", "train_log_probs_rollout1_rank0.json.gz",
    ]  # fmt: skip
    for trace in traces:
        with gzip.open(trace) as file:
            events = json.load(file)["traceEvents"]
        names = {event.get("name") for event in events}
        assert trace.name.split("_rollout")[0] in names and any("aten::" in str(n) for n in names)
        check_trace_events(events)


def check_trace_events(events: list[dict]) -> None:
    """What readers of the Trace Event Format, Perfetto among them, need of each kind of event."""
    needed = {
        "X": ("name", "ts", "dur", "pid", "tid"), "M": ("name", "pid", "args"),
        "i": ("name", "ts", "pid", "tid"), "s": ("id", "ts", "pid", "tid"),
        "f": ("id", "ts", "pid", "tid"), "C": ("name", "ts", "pid", "args"),
    }  # fmt: skip
    assert {event["ph"] for event in events} <= set(needed)
    for event in events:
        assert not set(needed[event["ph"]]) - set(event), event
    whole = [event for event in events if event["ph"] == "X"]
    assert len(whole) > 100 and all(e["dur"] >= 0 and e["ts"] >= 0 for e in whole)
    starts = {event["id"] for event in events if event["ph"] == "s"}
    assert {event["id"] for event in events if event["ph"] == "f"} <= starts
