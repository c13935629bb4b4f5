"""A data row chooses how its response is graded only as far as the user allows it."""

from __future__ import annotations

import pytest

from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.ray.start_checks import _check_data
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.hooks import check_hooks
from slime.rollout.rm_hub import async_rm
from slime.utils.http import run
from tests.args import make_args
from tests.prompts import rollout_args, write_rows

HOSTILE = {"rm_type": "reasoning_gym", "reasoning_gym": {"task": "n_queens", "row": 0}}


def rows(**metadata):
    return [{"input": "1+1=", "label": "2"}, {"input": "2+2=", "label": "4", "metadata": metadata}]


def test_a_row_cannot_choose_a_reward_that_the_user_did_not_name(tmp_path):
    """The attack: `--rm-type math`, and a downloaded row that asks for reasoning-gym's evaluation."""
    args = rollout_args(tmp_path, rows(**HOSTILE), rm_type="math")
    sentence = r"train.jsonl:2: metadata\['rm_type'\] is 'reasoning_gym'.*--allow-row-rm-types"
    with pytest.raises(ConfigError, match=sentence):
        _check_data(args)
    with pytest.raises(ConfigError, match=sentence):
        RolloutDataSource(args)
    with pytest.raises(ConfigError, match=r"sample 7: .*'reasoning_gym'"):
        run(async_rm(args, Sample(index=7, response="<answer>0</answer>", metadata=dict(HOSTILE))))


@pytest.mark.parametrize("asked", ["maths", 3, ["f1"], {"f1": 1}, True])
def test_odd_types_are_refused_too(tmp_path, asked):
    with pytest.raises(ConfigError, match=r"train.jsonl:2: metadata\['rm_type'\] is"):
        _check_data(rollout_args(tmp_path, rows(rm_type=asked), rm_type="f1"))


def test_rows_of_evaluation_data_are_held_to_the_type_of_their_dataset(tmp_path):
    data = write_rows(tmp_path / "held.jsonl", rows(rm_type="gpqa"))
    config = tmp_path / "eval.yaml"
    for own, allowed in (("gpqa", True), ("f1", False)):
        config.write_text(f"datasets:\n  - {{name: held, path: {data}, rm_type: {own}}}\n")
        args = rollout_args(tmp_path, rm_type="math", eval_config=str(config), eval_interval=1)
        if allowed:
            _check_data(args)
            continue
        with pytest.raises(ConfigError, match=r"held.jsonl:2: metadata\['rm_type'\] is 'gpqa'"):
            _check_data(args)


def test_the_types_that_the_user_names_are_used(tmp_path):
    args = rollout_args(tmp_path, rows(rm_type="f1"), rm_type="math", allow_row_rm_types=["f1"])
    _check_data(args)
    sample = RolloutDataSource(args).get_samples(2)[1][0]
    sample.response = "4"  # no box: 0 as mathematics, 1 by its words
    assert run(async_rm(args, sample)) == 1.0
    same = rollout_args(tmp_path, rows(rm_type="f1"), rm_type="f1")
    _check_data(same)
    assert run(async_rm(same, sample)) == 1.0
    for empty in (None, ""):
        sample.metadata["rm_type"] = empty
        assert run(async_rm(args.replace(rm_type="random", label_key=None), sample)) in (0.0, 1.0)


def test_rows_are_not_looked_at_where_a_custom_reward_scores_them(tmp_path):
    _check_data(
        rollout_args(
            tmp_path,
            rows(**HOSTILE),
            rm_type=None,
            custom_rm_path="tests.rollout_hooks.reward_length",
        )
    )


def test_a_row_cannot_name_code_to_import(tmp_path):
    paths = {"custom_rm_path": "os.system", "generate_function_path": "os.system"}
    data = [{"input": "a", "label": "b", **paths, "metadata": paths}]
    (group,) = RolloutDataSource(rollout_args(tmp_path, data, rm_type="f1")).get_samples(1)
    assert group[0].custom_rm_path is None and group[0].generate_function_path is None


def test_the_flag_takes_reward_types_only_and_they_must_work():
    with pytest.raises(ConfigError, match=r"--allow-row-rm-types maths: .*did you mean math\?"):
        make_args(allow_row_rm_types=["maths"])
    with pytest.raises(ConfigError, match=r"--allow-row-rm-types dapo gives score.*--reward-key"):
        check_hooks(make_args(allow_row_rm_types=["dapo"]))
    with pytest.raises(ConfigError, match=r"--allow-row-rm-types remote_rm needs .*--rm-url"):
        check_hooks(make_args(allow_row_rm_types=["remote_rm"]))
