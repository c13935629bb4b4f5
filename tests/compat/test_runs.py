"""Whole runs with hooks written for earlier versions of slime, several hooks to a run.

The hooks record what they saw; each test reads one run.
"""

import json

import pytest
import torch

from tests.e2e import runs

HOOKS, TRAIN = "tests.compat.rollout_hooks", "tests.compat.train_hooks"


def run_with(tmp_path, model, data, script="train.py", **flags):
    """Run to the end and return what the hooks noted, by hook, and the run's folder."""
    settings = tmp_path / "settings.yaml"
    log = tmp_path / "hooks.jsonl"
    settings.write_text(f"hook_log: {log}\nmy_knob: [1, two]\n")
    words = runs.command(
        model, data, tmp_path / "run", num_rollout=1, custom_config_path=settings, **flags
    )
    status, output = runs.run(words, script=script)
    assert status == 0, output
    notes = {}
    for line in log.read_text().splitlines():
        record = json.loads(line)
        notes.setdefault(record.pop("hook"), []).append(record)
    return notes, tmp_path / "run"


def test_generation_with_dictionary_rewards(tiny_model, tiny_data, tmp_path):
    notes, run_dir = run_with(
        tmp_path,
        tiny_model,
        tiny_data,
        data_source_path=f"{HOOKS}.Numbers",
        custom_generate_function_path=f"{HOOKS}.generate",
        custom_rm_path=f"{HOOKS}.reward_func",
        reward_key="score",
        dynamic_sampling_filter_path=f"{HOOKS}.keep_group",
        rollout_sample_filter_path=f"{HOOKS}.mark_samples",
        rollout_all_samples_process_path=f"{HOOKS}.all_samples",
        custom_reward_post_process_path=f"{HOOKS}.post_process_rewards",
        custom_rollout_log_function_path=f"{HOOKS}.log_rollout",
        eval_interval=1,
        eval_reward_key="score",
        eval_function_path=f"{HOOKS}.evaluate",
        custom_eval_rollout_log_function_path=f"{HOOKS}.log_eval",
        custom_advantage_function_path=f"{TRAIN}.advantages",
        rollout_data_postprocess_path=f"{TRAIN}.postprocess",
        use_tis=True,
        custom_tis_function_path=f"{TRAIN}.tis",
        custom_pg_loss_reducer_function_path=f"{TRAIN}.reducer",
    )
    (made,) = notes["generate"]
    assert made["model"] == str(tiny_model) and made["same"]
    assert made["loaded"][1] is None and made["params"]["max_new_tokens"] == 8
    assert [n["seen"] for n in notes["filter"]] == list(range(1, len(notes["filter"]) + 1))
    assert all(n["knob"] == [1, "two"] and len(n["rewards"]) == 4 for n in notes["filter"])
    assert notes["sample_filter"] == [{"groups": 4}]
    assert notes["all_samples"] == [{"groups": 4, "source": "Numbers"}]
    (rewards,) = notes["rewards"]
    assert len(rewards["raw"]) == 16 and len(set(rewards["raw"])) > 1
    assert notes["eval_log"][0]["names"] == ["again", "own"]
    check_trainer_notes(notes, rewards["raw"])
    (rollout,) = runs.metrics(run_dir, "rollout")
    # Two turns of at most three tokens each, and two tokens of a tool that are not trained on.
    assert 0 < rollout["rollout/my_tokens"] <= 16 * 6
    assert rollout["rollout/tokens"] == rollout["rollout/my_tokens"]
    assert rollout["rollout/response_len_mean"] == rollout["rollout/my_tokens"] / 16 + 2
    assert rollout["rollout/non_generation_time_mean"] > 0
    evaluated = runs.metrics(run_dir, "eval")
    for record, note in zip(evaluated, notes["eval_log"], strict=True):
        assert record["eval/own/reward"] == pytest.approx(sum(note["rewards"]) / 2)
        assert record["eval/again/reward"] == record["eval/own/reward"]


def check_trainer_notes(notes, raw):
    (advantages,) = notes["advantages"]
    assert len(advantages["lengths"]) == 16 and not advantages["has_values"]
    assert advantages["knob"] == [1, "two"]
    (after,) = notes["postprocess"]
    mean = sum(raw) / len(raw)
    assert sorted(after["rewards"]) == pytest.approx(sorted(r - mean for r in raw), abs=1e-6)
    assert after["advantages"] == pytest.approx([r / 2 for r in after["rewards"]], abs=1e-6)
    assert after["gap"] < 1e-2  # engine and trainer agree on the tokens of both turns
    assert sum(note["rows"] for note in notes["tis"]) == 16
    assert sum(note["responses"] for note in notes["tis"]) == sum(advantages["lengths"])


def test_group_rewards_and_a_loss(tiny_model, tiny_data, tmp_path):
    notes, run_dir = run_with(
        tmp_path,
        tiny_model,
        tiny_data,
        script="train_async.py",
        rollout_function_path="slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        data_source_path=f"{HOOKS}.Shortened",
        custom_rm_path=f"{HOOKS}.group_reward",
        group_rm=True,
        dynamic_sampling_filter_path=(
            "slime.rollout.filter_hub.dynamic_sampling_filters."
            "check_reward_nonzero_std_with_fallback"
        ),
        custom_convert_samples_to_train_data_path=f"{HOOKS}.convert",
        loss_type="custom_loss",
        custom_loss_function_path=f"{TRAIN}.loss",
    )
    assert notes["convert"] == [{"samples": 16}]
    # With a fallback no group is generated beyond those of the batch.
    assert notes["group_reward"] == [{"count": 4, "source": "Shortened"}] * 4
    check_loss(notes["loss"], run_dir)


def check_loss(notes, run_dir):
    """The loss is the mean over samples of the mean over tokens of what the hook computed."""
    assert sum(note["rows"] for note in notes) == 16
    means = []
    for note in notes:
        tokens = iter(note["per_token"])
        for old in note["old"]:
            mine = [next(tokens) for _ in old]
            assert mine == pytest.approx(old, abs=1e-2)  # against those of the engine
            means.append(sum(mine) / len(mine))
    (trained,) = runs.metrics(run_dir, "train")
    assert trained["train/nll"] == pytest.approx(sum(means) / 16, rel=1e-4)


def earlier_record(index):
    """A sample as other versions of slime store it: further keys, versions as text per request."""
    return {
        "group_index": index // 4, "index": index, "prompt": "1+1=", "tokens": [49, 43, 49, 61, 50, 257],
        "multimodal_inputs": None, "multimodal_train_inputs": None, "response": "2",
        "response_length": 2, "label": "2", "reward": float(index % 2), "loss_mask": None,
        "weight_versions": ["1"], "rollout_log_probs": [-0.7, -0.1], "remove_sample": False,
        "status": "completed", "metadata": {}, "train_metadata": None, "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0}, "prefix_cache_info": {"cached_tokens": 3},
    }  # fmt: skip


def test_recorded_samples_in_a_script_with_its_own_option(tiny_model, tiny_data, tmp_path):
    record = {"rollout_id": 0, "samples": [earlier_record(i) for i in range(16)]}
    torch.save(record, tmp_path / "0.pt")
    notes, run_dir = run_with(
        tmp_path,
        tiny_model,
        tiny_data,
        script="tests/compat/own_script.py",
        my_flag=7,
        debug_train_only=True,
        rollout_num_gpus=None,
        load_debug_rollout_data=tmp_path / "{rollout_id}.pt",
        loss_type="custom_loss",
        custom_loss_function_path=f"{TRAIN}.loss",
        custom_reward_post_process_path=(
            "slime.rollout.on_policy_distillation.post_process_rewards"
        ),
    )
    assert {note["my_flag"] for note in notes["loss"]} == {7}
    assert sum(note["rows"] for note in notes["loss"]) == 16
    (rollout,) = runs.metrics(run_dir, "rollout")
    assert rollout["rollout/reward_mean"] == 0.5
