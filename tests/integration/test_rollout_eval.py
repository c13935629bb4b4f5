"""Evaluation on named datasets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from slime.core.errors import ConfigError, UserError
from slime.core.types import Status
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.hooks import check_hooks
from slime.rollout.sampling import hash32
from slime.rollout.sglang_rollout import generate_rollout
from tests import rollout_hooks
from tests.fake_engine import Reply
from tests.prompts import rollout_args, sums, write_rows

HOOKS = "tests.rollout_hooks"


def eval_args(tmp_path, **overrides):
    held_out = write_rows(tmp_path / "held.jsonl", sums(6))
    other = write_rows(
        tmp_path / "other.jsonl", [{"input": "capital of France?", "label": "Paris"}]
    )
    values = {
        "rm_type": "math",
        "eval_prompt_data": ["sums", str(held_out), "other", f"{other}@[0:1]"],
        "eval_interval": 1,
        "n_samples_per_eval_prompt": 4,
        **overrides,
    }
    return rollout_args(tmp_path, **values)


def evaluate(args):
    return generate_rollout(args, 5, RolloutDataSourceWithBuffer(args), evaluation=True)


def test_rewards_pass_at_k_truncation_and_lengths(tmp_path, fake_engines):
    correct = {}

    def script(request):
        """Prompt i is answered rightly by its first i samples; sample 4 of prompt 0 never ends."""
        if "France" in request.prompt:
            return Reply(text="Paris")
        left = int(request.prompt[0])
        number = correct[left] = correct.get(left, 0) + 1
        if left == 0 and number == 4:
            return Reply(text="x" * 100)
        return Reply(text=rf"\boxed{{{left + 1 if number <= left else -5}}}")

    fake_engines(script)
    output = evaluate(eval_args(tmp_path))
    result = output.data["sums"]
    rewards = np.array(result.rewards).reshape(6, 4)
    assert rewards.sum(axis=1).tolist() == [0, 1, 2, 3, 4, 4]
    for k in (1, 2, 4):  # every way to draw k of the 4 samples
        best_of_k = [
            [row[list(pick)].max() for pick in combinations(range(4), k)] for row in rewards
        ]
        assert output.metrics[f"eval/sums/pass@{k}"] == pytest.approx(np.mean(best_of_k))
    assert output.metrics["eval/sums/reward"] == rewards.mean()
    assert output.metrics["eval/sums/truncated"] == 1 / 24
    assert sum(result.truncated) == 1 and len(result.samples) == 24
    lens = [s.response_length for s in result.samples]
    assert output.metrics["eval/sums/response_len"] == pytest.approx(np.mean(lens))
    assert output.metrics["eval/other/reward"] == 0.0  # no box
    assert "eval/sums/pass@8" not in output.metrics


def test_evaluation_does_not_touch_the_training_data(tmp_path, fake_engines):
    fake_engines()
    args = eval_args(tmp_path)
    source = RolloutDataSourceWithBuffer(args)
    before = source.state_dict()
    generate_rollout(args, 0, source, evaluation=True)
    assert source.state_dict() == before


def test_settings_per_dataset(tmp_path, fake_engines):
    (engine,) = fake_engines(
        lambda r: Reply(text="Paris" if "France" in r.prompt else r"\boxed{1}")
    )
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"""
defaults: {{n_samples_per_prompt: 2, temperature: 0.6}}
datasets:
  - {{name: sums, path: {tmp_path}/held.jsonl, max_response_len: 20}}
  - {{name: cities, path: {tmp_path}/other.jsonl, rm_type: f1, temperature: 0.0, top_p: 0.5}}
"""
    )
    args = eval_args(tmp_path, eval_prompt_data=None, eval_config=str(config))
    output = evaluate(args)
    assert output.metrics["eval/cities/reward"] == 1.0
    assert output.metrics["eval/sums/reward"] == pytest.approx(1 / 6)
    cities = [r.sampling_params for r in engine.requests if "France" in r.prompt]
    others = [r.sampling_params for r in engine.requests if "France" not in r.prompt]
    assert len(cities) == 2 and len(others) == 12
    assert {(p["temperature"], p["top_p"]) for p in cities} == {(0.0, 0.5)}
    assert {(p["temperature"], p["max_new_tokens"]) for p in others} == {(0.6, 20)}


def test_hooks_keys_and_stops_per_dataset(tmp_path, fake_engines):
    rollout_hooks.seen.clear()
    (engine,) = fake_engines(lambda r: Reply(text="Paris"))
    write_rows(
        tmp_path / "noted.jsonl",
        [{"input": "France?", "note": {"rm_type": "f1"}, "label": "Paris"}],
    )
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"""
datasets:
  - {{name: plain, path: {tmp_path}/held.jsonl}}
  - {{name: scored, path: {tmp_path}/held.jsonl, custom_rm_path: {HOOKS}.reward_dictionary,
      reward_key: score, stop: ["a", "b"], stop_token_ids: [7],
      custom_generate_function_path: {HOOKS}.generate_two_turns}}
  - {{name: noted, path: {tmp_path}/noted.jsonl, metadata_key: note}}
"""
    )
    args = eval_args(
        tmp_path, eval_prompt_data=None, eval_config=str(config), allow_row_rm_types=["f1"]
    )
    check_hooks(args)
    output = evaluate(args)
    assert output.metrics["eval/plain/reward"] == 0.0  # --rm-type math: no box
    assert output.metrics["eval/scored/reward"] == 0.5
    assert output.metrics["eval/noted/reward"] == 1.0
    assert set(output.data["scored"].rewards) == {0.5}
    assert output.metrics["eval/scored/reward/score"] == 0.5
    stops = [
        (r.sampling_params.get("stop"), r.sampling_params.get("stop_token_ids"))
        for r in engine.requests
    ]
    assert stops.count((["a", "b"], [7])) == 6 * 4 * 2 and stops.count((None, None)) == 6 * 4 + 4
    assert ("evaluation", True) in rollout_hooks.seen
    config.write_text(config.read_text().replace("reward_dictionary", "no_such_reward"))
    with pytest.raises(ConfigError, match=r"custom_rm_path of the evaluation dataset scored"):
        check_hooks(eval_args(tmp_path, eval_prompt_data=None, eval_config=str(config)))


def test_eval_reward_key_and_evaluation_flag_of_hooks(tmp_path, fake_engines):
    fake_engines()
    args = eval_args(
        tmp_path,
        rm_type=None,
        custom_rm_path=f"{HOOKS}.reward_dictionary",
        custom_generate_function_path=f"{HOOKS}.generate_two_turns",
        eval_reward_key="score",
    )
    output = evaluate(args)
    assert output.metrics["eval/sums/reward"] == 0.5
    assert set(rollout_hooks.seen) == {("evaluation", True)}


def test_failed_samples_are_counted_and_not_averaged(tmp_path, fake_engines, caplog):
    fake_engines()
    args = eval_args(tmp_path, rm_type=None, custom_rm_path=f"{HOOKS}.reward_fails_on_odd")
    output = evaluate(args)
    assert output.metrics["eval/sums/failed"] == 12
    assert output.metrics["eval/sums/reward"] == 1.0
    assert sum(s.status == Status.FAILED for s in output.data["sums"].samples) == 12
    assert "12 of 24 samples of the evaluation on sums failed and are not counted" in caplog.text


def test_all_failing_stops(tmp_path, fake_engines):
    fake_engines()
    args = eval_args(tmp_path, rm_type=None, custom_rm_path=f"{HOOKS}.reward_always_fails")
    with pytest.raises(UserError, match=r"every sample of the evaluation on (sums|other) failed"):
        evaluate(args)


def test_deterministic_seeds_are_those_of_every_evaluation(tmp_path, fake_engines):
    (engine,) = fake_engines()
    args = eval_args(tmp_path).replace(deterministic=True)
    evaluate(args)
    first = {(r.prompt, r.sampling_params["sampling_seed"]) for r in engine.requests}
    assert ("0+1=", hash32(args.rollout_seed, "eval", "sums", 0)) in first
    assert len(first) == len(engine.requests) == 28
    evaluate(args)
    assert {(r.prompt, r.sampling_params["sampling_seed"]) for r in engine.requests} == first


def test_messages_name_the_flags_of_evaluation(tmp_path, fake_engines):
    fake_engines()
    with pytest.raises(ConfigError, match="--eval-input-key"):
        evaluate(eval_args(tmp_path, eval_input_key="question"))
    with pytest.raises(UserError, match="--eval-prompt-data NAME PATH"):
        evaluate(rollout_args(tmp_path))
