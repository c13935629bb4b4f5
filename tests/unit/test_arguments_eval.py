"""Evaluation datasets from the command line and from --eval-config."""

import pytest

from slime.config.arguments import EvalDataset
from slime.core.errors import ConfigError
from tests.args import make_args

HERE = __file__


def from_config(tmp_path, text: str, **overrides: object) -> list[EvalDataset]:
    file = tmp_path / "eval.yaml"
    file.write_text(text.replace("HERE", HERE))
    return make_args(eval_config=file, eval_interval=1, **overrides).eval_datasets


def test_pairs_on_the_command_line():
    args = make_args(
        eval_prompt_data=["a", HERE, "b", f"{HERE}@[0:2]"],
        eval_interval=1,
        n_samples_per_eval_prompt=3,
        eval_top_p=0.5,
        rollout_temperature=0.9,
        label_key="answer",
    )
    common = {
        "n_samples_per_prompt": 3,
        "temperature": 0.9,
        "top_p": 0.5,
        "top_k": -1,
        "max_response_len": 8,
        "input_key": "input",
        "label_key": "answer",
        "rm_type": None,
    }
    assert args.eval_datasets == [
        EvalDataset(name="a", path=HERE, **common),
        EvalDataset(name="b", path=f"{HERE}@[0:2]", **common),
    ]


def test_defaults_and_datasets_of_a_file(tmp_path):
    datasets = from_config(
        tmp_path,
        """
        defaults: {temperature: 0, n-samples-per-prompt: 4, rm_type: math}
        datasets:
          - {name: a, path: HERE}
          - {name: b, path: HERE, temperature: 0.6, max_response_len: 5, label_key: l}
        """,
        eval_top_k=7,
    )
    a, b = datasets
    assert (a.temperature, a.n_samples_per_prompt, a.rm_type, a.top_k) == (0.0, 4, "math", 7)
    assert (b.temperature, b.n_samples_per_prompt, b.max_response_len) == (0.6, 4, 5)
    assert (a.label_key, b.label_key, a.max_response_len) == (None, "l", 8)


def test_both_sources_add_up(tmp_path):
    datasets = from_config(
        tmp_path, "datasets: [{name: b, path: HERE}]", eval_prompt_data=["a", HERE]
    )
    assert [dataset.name for dataset in datasets] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("datasets: [{name: a}]", ["datasets[0]", "path"]),
        ("datasets: [{path: HERE}]", ["datasets[0]", "name"]),
        ("datasets: [{name: a, path: HERE, temprature: 1}]", ["temprature", "did you mean temp"]),
        ("datasets: [{name: a, path: HERE, top_k: many}]", ["top_k", "'many'", "whole number"]),
        ("defaults: {zzz: 1}\ndatasets: [{name: a, path: HERE}]", ["defaults", "zzz"]),
        ("defaults: {temperature: 1}", ["datasets"]),
        ("datasets: []", ["datasets"]),
        ("datasets: [a]", ["datasets[0]"]),
        ("dataset: [{name: a, path: HERE}]", ["'dataset'", "datasets"]),
        ("datasets: [{name: a, path: /no/eval.jsonl}]", ["/no/eval.jsonl"]),
    ],
)
def test_mistakes_name_file_and_key(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        from_config(tmp_path, text)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "eval.yaml" in message or "/no/eval.jsonl" in message


@pytest.mark.parametrize(
    "flags",
    [
        {"debug_rollout_only": True, "eval_interval": 5},
        {"debug_rollout_only": True, "eval_interval": 1, "num_rollout": 0},
        {"num_rollout": 20, "load_debug_rollout_data": HERE, "eval_interval": 5},  # no engines
        {"num_rollout": 20, "eval_interval": 20},  # after the last rollout, which always updates
    ],
)
def test_evaluations_that_cannot_see_stale_weights_are_accepted(flags):
    flags = {"eval_prompt_data": ["a", HERE], "update_weights_interval": 3, **flags}
    assert make_args(**flags).eval_interval == flags["eval_interval"]
    with pytest.raises(ConfigError, match="--eval-interval 5: engines get new weights every 3"):
        engines = {"debug_rollout_only": False, "load_debug_rollout_data": None}
        make_args(**{**flags, "num_rollout": 20, "eval_interval": 5, **engines})
