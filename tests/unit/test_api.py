"""What `slime.train` accepts, writes and refuses before anything starts; how reward functions are called."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import slime
from slime import api, api_inputs
from slime.config.arguments import read_given
from slime.core.errors import ConfigError, UserError
from slime.core.types import Sample
from slime.data.prompt_data import DataFormat, load_prompts
from slime.ray import python_functions
from tests.tiny import make_byte_tokenizer

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
SAMPLE = Sample(prompt="1+1=", response="22", label="2", metadata=ROWS[0])


def by_sample(sample):
    return len(sample.response)


def by_args(args, sample):
    return args + len(sample.response)


def by_columns(completions, answer):
    return [float(c.count(a)) for c, a in zip(completions, answer, strict=True)]


async def awaited(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [len(prompts[0]) + len(completions[0]) + len(columns["answer"][0])]


@pytest.mark.parametrize(
    ("fn", "expected"), [(by_sample, 2), (by_args, 12), (by_columns, 2.0), (awaited, 4 + 2 + 1)]
)
def test_a_reward_is_called_by_its_parameters(fn, expected):
    value = python_functions.score(python_functions.make_functions(fn, None), 10, SAMPLE)
    assert (asyncio.run(value) if asyncio.iscoroutine(value) else value) == expected


def test_several_rewards_are_summed_and_kept():
    functions = python_functions.make_functions(
        [by_sample, by_sample, awaited, lambda s: None], None
    )
    assert functions.reward_key == "reward"
    value = asyncio.run(python_functions.score(functions, 10, SAMPLE))
    parts = {"by_sample": 2, "by_sample_2": 2, "awaited": 7, "lambda": 0}
    assert value == {"reward": 11, **parts}


def test_conversations_reach_trl_functions_as_messages():
    chat = [{"role": "user", "content": "1+1="}]
    sample = Sample(prompt="<user>1+1=", response="2", metadata={"prompt": chat})
    functions = python_functions.make_functions(
        lambda prompts, completions: [(prompts, completions)], None
    )
    expected = ([chat], [[{"role": "assistant", "content": "2"}]])
    assert python_functions.score(functions, None, sample) == expected


@pytest.mark.parametrize("wrong", [3, "my.module", int, lambda: 1, lambda a, b, c: 1])
def test_what_is_no_reward_function(wrong):
    with pytest.raises(ConfigError, match="expected reward"):
        python_functions.make_functions(wrong, None)


def test_functions_are_stored_by_value_for_this_user_alone(tmp_path):
    bonus = 3
    python_functions.store(python_functions.make_functions(lambda s: bonus, None), tmp_path)
    program = (
        "import sys, pathlib; from slime.ray import python_functions as p;"
        "print(p.score(p.load(pathlib.Path(sys.argv[1])), None, None))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr


@pytest.mark.parametrize("damage", ["readable", "link", "missing", "foreign", "other program"])
def test_a_file_of_others_is_not_unpickled(tmp_path, damage):
    python_functions.store(python_functions.make_functions(by_sample, None), tmp_path)
    file = tmp_path / "functions.pkl"
    if damage == "readable":
        file.chmod(0o640)
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "missing":
        file.unlink()
    elif damage == "other program":  # as of a run folder from elsewhere
        file.write_bytes(file.read_bytes()[:32] + pickle.dumps(os.getcwd))
    elif os.getuid() == 0:
        os.chown(file, 12345, -1)
    else:
        pytest.skip("only root gives files away")
    with pytest.raises(UserError, match=r"functions\.pkl (is not loaded|does not exist)"):
        python_functions.load(tmp_path)


def options_of(folder: Path, dataset, reward=None, generate=None, eval_dataset=None, **options):
    return api_inputs.write_inputs(
        folder, "a/model", dataset, reward, generate, eval_dataset, options
    )


def test_options_become_flags(tmp_path):
    inputs = tmp_path / "inputs"
    options = {"lr": 1e-5, "save": None, "load": Path("ck"), "eval_dataset": ROWS[:1]}
    assert options_of(inputs, ROWS, by_sample, **options) == {
        "hf_checkpoint": "a/model",
        "prompt_data": [str(inputs / "train.jsonl")],
        "eval_prompt_data": ["eval", str(inputs / "eval.jsonl")],
        "input_key": "prompt",
        "label_key": "answer",
        "metadata_key": "slime_row",
        "custom_rm_path": "slime.ray.python_functions.reward",
        "lr": 1e-5,
        "save": None,
        "load": "ck",
        "save_hf": "{run_dir}/hf",
    }
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    assert rows == [{**row, "slime_row": row} for row in ROWS]


def test_secrets_are_not_written(tmp_path):
    (tmp_path / "inputs").mkdir()
    values = {
        "wandb_key": "abc123",
        "lr": 1e-5,
        "num_rollout": 3,
        "eval_prompt_data": ["eval", "x"],
    }
    words = api_inputs.write_config(tmp_path, values)
    assert "abc123" not in (tmp_path / "inputs" / "options.yaml").read_text()
    given, _ = read_given(words)
    assert {name: given[name] for name in values} == values


def test_a_path_is_read_where_it_is(tmp_path):
    values = options_of(tmp_path / "inputs", Path("x.jsonl"), rm_type="math", input_key="q")
    assert values["prompt_data"] == ["x.jsonl"] and values["input_key"] == "q"
    assert "custom_rm_path" not in values


def test_messages_are_rendered_unless_a_function_generates(tmp_path):
    async def generate(args, sample, sampling_params):
        return sample

    rows = [{"prompt": [{"role": "user", "content": "1+1="}]}]
    assert options_of(tmp_path / "a", rows, by_sample)["apply_chat_template"] is True
    values = options_of(tmp_path / "b", rows, by_sample, generate)
    assert "apply_chat_template" not in values
    assert values["custom_generate_function_path"] == "slime.ray.python_functions.generate"


@pytest.mark.parametrize(
    ("message", "rows", "options"),
    [
        ("no rows", [], {}),
        ("rows have no column 'input'", [{"text": "x"}], {}),
        ("row 0 cannot be written", [{"prompt": "x", "image": object()}], {}),
        ("there is no flag num_rollouts; did you mean --num-rollout", ROWS, {"num_rollouts": 3}),
        ("takes an import path", ROWS, {"custom_loss_function_path": by_sample}),
        (
            "rm_type and reward are mutually exclusive",
            ROWS,
            {"reward": by_sample, "rm_type": "math"},
        ),
        ("prompt_data and dataset", ROWS, {"prompt_data": "x"}),
        ("reward_key and reward", ROWS, {"reward": [by_sample, by_args], "reward_key": "x"}),
        ("expected async def generate", ROWS, {"generate": by_sample}),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_the_name_free(tmp_path, message, rows, options):
    with pytest.raises(ConfigError, match=message):
        api.train("model", rows, run_dir=tmp_path / "run", **options)
    assert not list(tmp_path.rglob("*.*"))


def test_an_earlier_run_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"resume\(\)"):
        api.train("model", ROWS, run_dir=tmp_path)


def test_importing_slime_is_light():
    program = (
        "import sys, slime; print(sorted({'torch', 'ray', 'yaml', 'slime.api'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    program = "import sys, slime; slime.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = slime.trian


def test_a_column_called_metadata_hides_no_other(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2", "metadata": {"level": 1}}]
    values = options_of(tmp_path / "inputs", rows, by_columns)
    data_format = DataFormat(
        label_key="answer", input_key="prompt", metadata_key=values["metadata_key"]
    )
    dataset = load_prompts(values["prompt_data"][0], data_format, make_byte_tokenizer())
    assert dataset.make_sample(0).metadata == rows[0]


def test_the_metadata_of_an_evaluation_file_in_the_options_is_read(tmp_path):
    file = tmp_path / "held.jsonl"
    file.write_text("{}")
    rows = [{"prompt": "1+1=", "answer": "2"}]
    given = {"reward": by_columns, "dataset": rows, "eval_prompt_data": ["held", str(file)]}
    assert "metadata_key" not in options_of(tmp_path / "inputs", **given)


@pytest.mark.parametrize("written", ["dataset", "eval_dataset"])
def test_rows_and_a_file_are_read_by_one_metadata_key(tmp_path, written):
    """The file's metadata is not lost, nor are the columns of the rows, which reward functions get."""
    row = {"prompt": "1+1=", "answer": "2", "level": 1}
    file = tmp_path / "file.jsonl"
    file.write_text(json.dumps({"prompt": "1+2=", "answer": "3", "metadata": {"level": 2}}) + "\n")
    data = {"dataset": str(file), "eval_dataset": str(file), written: [row]}
    keys = {"input_key": "prompt", "label_key": "answer"}
    values = options_of(tmp_path / "inputs", reward=by_columns, **data, **keys)
    wanted = {"dataset": {"level": 2}, "eval_dataset": {"level": 2}, written: row}
    data_format = DataFormat(**keys, metadata_key=values.get("metadata_key", "metadata"))
    paths = {"dataset": values["prompt_data"][0], "eval_dataset": values["eval_prompt_data"][1]}
    for name, path in paths.items():
        dataset = load_prompts(path, data_format, make_byte_tokenizer())
        assert dataset.make_sample(0).metadata == wanted[name]
