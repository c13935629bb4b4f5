"""tools/prepare_data.py on rows as the datasets were published."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from slime.rollout.data_source import RolloutDataSource
from tests.prompts import rollout_args, write_rows
from tools.prepare_data import BOXED, main


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def convert(name, rows, tmp_path, kind="parquet", *options):
    source, target = tmp_path / f"in.{kind}", tmp_path / "out.jsonl"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), source)
    else:
        write_rows(source, rows)
    assert main([name, str(source), str(target), *options]) == 0
    return written(target)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_gsm8k(tmp_path, kind):
    rows = [{"question": "2 x 600?", "answer": "2 x 600 = <<2*600=1200>>1200\n#### 1,200"}]
    (row,) = convert("gsm8k", rows * 2, tmp_path, kind)  # equal prompts once
    assert row["label"] == "1200" and row["metadata"] == {"source": "gsm8k"}
    assert row["prompt"] == [{"role": "user", "content": f"2 x 600?\n{BOXED}"}]


def test_dapo_as_published_and_as_flattened(tmp_path):
    messages = [{"content": "Solve. Answer: $Answer", "role": "user"}]
    published = {
        "data_source": "math_dapo", "prompt": messages, "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "9a9b"},
    }  # fmt: skip
    (row,) = convert("dapo-math-17k", [published] * 3, tmp_path)
    assert row["prompt"] == [{"role": "user", "content": "Solve. Answer: $Answer"}]
    assert row["label"] == "34" and row["metadata"] == {"source": "math_dapo", "id": "9a9b"}
    (row,) = convert("dapo-math-17k", [{"prompt": messages, "label": "7"}], tmp_path, "jsonl")
    assert row["label"] == "7"


@pytest.mark.parametrize(
    "row",
    [
        {"ID": "2024-I-1", "Problem": "P", "Solution": "S", "Answer": 204},
        {"id": 60, "problem": "P", "solution": "S", "answer": "204", "url": "u", "year": "2024"},
    ],
)
def test_aime_in_the_spellings_of_its_publishers(tmp_path, row):
    (made,) = convert("aime-2024", [row], tmp_path, "parquet", "--instruction", "Go.")
    assert made["prompt"] == [{"role": "user", "content": "P\nGo."}] and made["label"] == "204"


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
