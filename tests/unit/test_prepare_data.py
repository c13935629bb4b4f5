"""tools/prepare_data.py on rows as the datasets were published."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from slime.core.types import Sample
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.rm_hub import async_rm
from slime.utils.http import run
from tests.args import make_args
from tests.prompts import rollout_args, write_rows
from tools.prepare_data import ANSWER_LINE, BOXED, main


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# The columns and types of the published files, as their dataset cards list them.
MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
GRADED = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
DAPO = pa.schema(
    [
        ("data_source", pa.string()), ("prompt", MESSAGES), ("ability", pa.string()),
        ("reward_model", GRADED), ("extra_info", pa.struct([("index", pa.string())])),
    ]
)  # fmt: skip
DAPO_PROCESSED = pa.schema(
    [
        ("prompt", pa.string()), ("solution", pa.string()), ("data_source", pa.string()),
        ("source_prompt", MESSAGES), ("ability", pa.string()), ("reward_model", GRADED),
        ("extra_info", pa.struct([("index", pa.string())])),
    ]
)  # fmt: skip
AIME_H4 = pa.schema(
    [
        ("id", pa.int64()), ("problem", pa.string()), ("solution", pa.string()),
        ("answer", pa.string()), ("url", pa.string()), ("year", pa.string()),
    ]
)  # fmt: skip
AIME_JIA = pa.schema(
    [
        ("ID", pa.string()),
        ("Problem", pa.string()),
        ("Solution", pa.string()),
        ("Answer", pa.int64()),
    ]
)
GSM8K = pa.schema([("question", pa.string()), ("answer", pa.string())])
DAPO_TEXT = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 30+4?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def published(source, prompt=DAPO_TEXT):
    return {
        "data_source": source, "prompt": [{"content": prompt, "role": "user"}], "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }  # fmt: skip


def convert(name, rows, tmp_path, kind="parquet", *options, schema=None):
    source, target = tmp_path / f"in.{kind}", tmp_path / "out.jsonl"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows, schema=schema), source)
    else:
        write_rows(source, rows)
    assert main([name, str(source), str(target), *options]) == 0
    return written(target)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_gsm8k(tmp_path, kind):
    rows = [{"question": "2 x 600?", "answer": "2 x 600 = <<2*600=1200>>1200\n#### 1,200"}]
    (row,) = convert("gsm8k", rows * 2, tmp_path, kind, schema=GSM8K)  # equal prompts once
    assert row["label"] == "1200" and row["metadata"] == {"source": "gsm8k"}
    assert row["prompt"] == [{"role": "user", "content": f"2 x 600?\n{BOXED}"}]


def test_gsm8k_shaped_for_another_framework(tmp_path):
    row = {**published("openai/gsm8k", "How many?"), "extra_info": {"index": "0"}}
    (made,) = convert("gsm8k", [row], tmp_path)
    assert made["label"] == "34" and made["prompt"][0]["content"] == "How many?"


def test_dapo_as_published_and_as_flattened(tmp_path, capsys):
    (row,) = convert("dapo-math-17k", [published("math_dapo")] * 100, tmp_path, schema=DAPO)
    assert row["prompt"] == [{"role": "user", "content": DAPO_TEXT}] and row["label"] == "34"
    index = published("")["extra_info"]["index"]
    assert row["metadata"] == {"source": "math_dapo", "id": index}
    assert "1 rows, 99 repeated" in capsys.readouterr().out
    flat = {"prompt": [{"content": DAPO_TEXT, "role": "user"}], "label": "7"}
    (row,) = convert("dapo-math-17k", [flat], tmp_path, "jsonl")
    assert row["label"] == "7"


def test_dapo_processed_gets_its_instruction_back(tmp_path):
    """Its prompt is the bare question: a reward that looks for "Answer:" would never be earned."""
    whole = published("math_dapo")
    processed = {**whole, "prompt": "What is 30+4?", "solution": "34"}
    with_source = {**processed, "source_prompt": whole["prompt"]}
    (row,) = convert("dapo-math-17k", [with_source], tmp_path, schema=DAPO_PROCESSED)
    assert row["prompt"] == [{"role": "user", "content": DAPO_TEXT}]
    bare = {"prompt": "What is 30+4?", "solution": "34"}
    (row,) = convert("dapo-math-17k", [bare], tmp_path)
    assert row["prompt"][0]["content"] == f"What is 30+4?\n{ANSWER_LINE}" and row["label"] == "34"


@pytest.mark.parametrize(
    ("row", "schema"),
    [
        ({"ID": "2024-I-1", "Problem": "P", "Solution": "S", "Answer": 204}, AIME_JIA),
        (
            {
                "id": 60,
                "problem": "P",
                "solution": "S",
                "answer": "204",
                "url": "u",
                "year": "2024",
            },
            AIME_H4,
        ),
        ({"id": 60, "problem": "P", "solution": r"so \boxed{204}.", "url": "u"}, None),
    ],
)
def test_aime_in_the_spellings_of_its_publishers(tmp_path, row, schema):
    (made,) = convert(
        "aime-2024", [row], tmp_path, "parquet", "--instruction", "Go.", schema=schema
    )
    assert made["prompt"] == [{"role": "user", "content": "P\nGo."}] and made["label"] == "204"


@pytest.mark.parametrize(
    ("name", "row", "response", "flags"),
    [
        ("dapo-math-17k", published("math_dapo"), "34\nAnswer: 34", "dapo --reward-key score"),
        ("aime-2024", published("aime"), "34\nAnswer: 34", "dapo --reward-key score"),
        ("aime-2024", {"problem": "P", "answer": "34"}, r"\boxed{34}", "math"),
        ("gsm8k", {"question": "Q", "answer": "#### 34"}, r"\boxed{34}", "math"),
    ],
)
def test_the_reward_it_names_is_earned_by_what_the_prompts_ask_for(
    tmp_path, capsys, name, row, response, flags
):
    (made,) = convert(name, [row], tmp_path)
    assert f"reward: --rm-type {flags}" in capsys.readouterr().out
    rm_type, *key = flags.split(" --reward-key ")
    sample = Sample(response=response, label=made["label"])
    args = make_args(rm_type=rm_type, reward_key=key[0] if key else None)
    sample.reward = run(async_rm(args, sample))
    assert sample.get_reward_value(args.reward_key) == 1.0


def test_what_was_written_is_what_a_run_reads(tmp_path):
    rows = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(3)]
    convert("gsm8k", rows, tmp_path)
    args = rollout_args(
        tmp_path, prompt_data=[str(tmp_path / "out.jsonl")], input_key="prompt", label_key="label",
        apply_chat_template=True, rm_type="math",
    )  # fmt: skip
    (group,) = RolloutDataSource(args).get_samples(1)
    assert group[0].prompt.startswith("0+1?") and group[0].label == "1"


def test_mistakes_are_one_sentence(tmp_path, capsys):
    source = write_rows(tmp_path / "a.jsonl", [{"question": "q", "answer": "no number"}])
    assert main(["gsm8k", str(source), str(tmp_path / "o.jsonl")]) == 2
    assert "a.jsonl:1: the answer has no '####'" in capsys.readouterr().err
    assert not (tmp_path / "o.jsonl").exists()
    assert main(["dapo-math-17k", str(source), str(tmp_path / "o.jsonl")]) == 2
    assert "no prompt; the columns are question, answer" in capsys.readouterr().err
