"""reasoning-gym tasks as prompt data, scored by their own task."""

from __future__ import annotations

import pytest

reasoning_gym = pytest.importorskip("reasoning_gym")

from slime.core.errors import ConfigError  # noqa: E402
from slime.data.prompt_data import DataFormat, load_prompts  # noqa: E402
from slime.rollout.data_source import RolloutDataSource  # noqa: E402
from slime.rollout.rm_hub import async_rm  # noqa: E402
from slime.utils.http import run  # noqa: E402
from tests.odd_texts import ODD  # noqa: E402
from tests.prompts import rollout_args, sums, write_rows  # noqa: E402
from tests.tiny import make_byte_tokenizer  # noqa: E402


def test_rows_are_those_of_the_package():
    data = load_prompts("reasoning-gym:leg_counting@[5:8]", DataFormat(), make_byte_tokenizer())
    direct = reasoning_gym.create_dataset("leg_counting", seed=42, size=8)
    assert [data.make_sample(i).prompt for i in range(3)] == [
        direct[i]["question"] for i in (5, 6, 7)
    ]


def test_modules_of_the_working_directory_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.chdir(tmp_path)
    data = load_prompts("reasoning-gym:leg_counting@[8:9]", DataFormat(), make_byte_tokenizer())
    assert data.make_sample(0).prompt


@pytest.mark.parametrize("task", ["leg_counting", "chain_sum", "word_sorting", "syllogism"])
def test_the_task_scores_its_rows(tmp_path, task):
    args = rollout_args(tmp_path, prompt_data=[f"reasoning-gym:{task}@[0:4]"], rm_type=None)
    for group in RolloutDataSource(args).get_samples(4):
        sample = group[0]
        for text in ("<think>hm</think> <answer> {} </answer>", "so \\boxed{{{}}}", "{}"):
            sample.response = text.format(sample.label)
            assert run(async_rm(args, sample)) == 1.0
        sample.response = "<answer>nonsense</answer>"
        assert run(async_rm(args, sample)) < 1.0


def test_odd_answers_never_raise(tmp_path):
    args = rollout_args(tmp_path, prompt_data=["reasoning-gym:chain_sum@[0:1]"], rm_type=None)
    sample = RolloutDataSource(args).get_samples(1)[0][0]
    for text in ODD:
        sample.response = text
        assert 0.0 <= run(async_rm(args, sample)) <= 1.0


def test_tasks_mix_with_files_by_weight_and_epochs_count_them(tmp_path):
    file = write_rows(tmp_path / "own.jsonl", sums(10))
    args = rollout_args(
        tmp_path, prompt_data=[str(file), "reasoning-gym:chain_sum@[0:6]:weight=2"],
        num_epoch=3, num_rollout=None, rollout_batch_size=2, rollout_shuffle=True,
    )  # fmt: skip
    assert args.num_rollout == 3 * (10 + 2 * 6) // 2
    source = RolloutDataSource(args)
    assert len(source) == 22
    prompts = [group[0].prompt for group in source.get_samples(22)]
    assert len(set(prompts)) == 16 and sum("=" not in p or "?" in p for p in prompts) <= 12


def test_wrong_names_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"no task 'leg_count'; did you mean leg_counting\?"):
        load_prompts("reasoning-gym:leg_count", DataFormat(), None)
    with pytest.raises(ConfigError, match="count from 0"):
        load_prompts("reasoning-gym:chain_sum@[-5:]", DataFormat(), None)
    with pytest.raises(ConfigError, match=r"reasoning-gym:<task>"):
        load_prompts("reasoning-gym:", DataFormat(), None)
