"""The quickstart's task, model and command lines."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from slime.cli.quickstart import FULL, SMOKE, as_typed, grpo_command, run_quickstart, warmup_command
from slime.cli.quickstart_task import (
    TEACHER_ACCURACY,
    VOCAB_SIZE,
    TaskData,
    make_tokenizer,
    reward,
    write_data,
    write_model,
)
from slime.config.arguments import parse_args
from slime.core.errors import ConfigError
from slime.core.types import Sample
from slime.data.sft_loss_mask import masked_conversation


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digits(row: dict[str, str]) -> str:
    return row["prompt"].removeprefix("Sort ")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> TaskData:
    folder = tmp_path_factory.mktemp("data")
    return write_data(folder, num_warmup=4000, num_train=300, num_heldout=200, seed=3)


def test_no_prompt_is_in_two_files_or_twice_in_one(data):
    prompts = [row["prompt"] for path in vars(data).values() for row in rows(path)]
    assert len(prompts) == len(set(prompts)) == 4500


def test_the_full_size_leaves_the_prompts_it_needs():
    needed = FULL.heldout + FULL.grpo_rollouts * FULL.prompts
    needed += FULL.warmup_rollouts * 10 * FULL.warmup_batch
    assert needed <= sum(1 for _ in permutations(range(10), 5))


def test_answers_are_the_digits_in_ascending_order(data):
    for row in rows(data.train) + rows(data.heldout):
        answer = [int(d) for d in row["answer"]]
        assert all(a < b for a, b in pairwise(answer))
        assert Counter(row["answer"]) == Counter(digits(row))


def test_the_teacher_sorts_and_is_right_as_seldom_as_promised(data):
    taught = rows(data.warmup)
    right = [row["answer"] == "".join(sorted(digits(row))) for row in taught]
    wrong = [row["answer"] == "".join(sorted(digits(row), reverse=True)) for row in taught]
    assert sum(right) + sum(wrong) == len(taught)
    deviation = (TEACHER_ACCURACY * (1 - TEACHER_ACCURACY) / len(taught)) ** 0.5
    assert abs(sum(right) / len(taught) - TEACHER_ACCURACY) < 5 * deviation
    assert TEACHER_ACCURACY < 0.3


def test_the_seed_alone_decides_the_data(data, tmp_path):
    sizes = {"num_warmup": 4000, "num_train": 300, "num_heldout": 200}
    same = write_data(tmp_path / "same", seed=3, **sizes)
    other = write_data(tmp_path / "other", seed=4, **sizes)
    assert same.warmup.read_text() == data.warmup.read_text()
    assert other.warmup.read_text() != data.warmup.read_text()


@pytest.mark.parametrize(
    ("response", "expected"),
    [("13568", 1.0), ("86531", 0.0), ("1356", 0.0), ("135680", 0.0), ("", 0.0)],
)
def test_reward_is_one_for_the_right_answer_only(response, expected):
    sample = Sample(prompt="Sort 53816", response=response, label="13568")
    assert asyncio.run(reward(None, sample)) == expected


def test_no_constant_answer_scores_well(data):
    (_, most_common), *_ = Counter(row["answer"] for row in rows(data.heldout)).most_common(1)
    assert most_common / len(rows(data.heldout)) < 0.3


def test_tokenizer_keeps_any_text_and_writes_chatml():
    tokenizer = make_tokenizer()
    for text in ("Sort 53816", "user assistant", "naïve ☃\n\t<b>"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = [{"role": "user", "content": "Sort 53816"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nSort 53816<|im_end|>\n<|im_start|>assistant\n"
    assert max(tokenizer.get_vocab().values()) < VOCAB_SIZE
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("Sort 53816")]
    assert pieces == ["Sort", " ", "5", "3", "8", "1", "6"]


def test_conversations_are_masked_to_the_answer():
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": "Sort 21"}, {"role": "assistant", "content": "12"}]
    tokens, mask = masked_conversation(tokenizer, chat)
    trained = [token for token, trained_on in zip(tokens, mask, strict=True) if trained_on]
    assert tokenizer.decode(trained) == "12<|im_end|>"


def test_model_is_a_small_qwen3_that_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    num_parameters = write_model(tmp_path / "model", seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.model_type == "qwen3"
    assert sum(p.numel() for p in model.parameters()) == num_parameters < 5_000_000
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("size", [FULL, SMOKE])
def test_command_lines_are_valid_and_printed_as_typed(tmp_path, size, data):
    for folder in ("model", "warmup/hf"):
        write_model(tmp_path / folder, seed=1)
    for words in (
        warmup_command(tmp_path, data, size, seed=5),
        grpo_command(tmp_path, data, size, seed=5),
    ):
        args = parse_args(words)
        assert args.seed == args.rollout_seed == 5
        typed = as_typed(words)
        assert shlex.split(typed.replace("\\\n", "")) == ["slime", "train", *words]
        assert max(map(len, typed.splitlines())) < 120 + len(str(tmp_path))


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="name a new folder"):
        run_quickstart(["--run-dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_part_of_a_flag_is_no_flag(capsys):
    with pytest.raises(SystemExit):
        run_quickstart(["--smok"])
    assert "unrecognized arguments: --smok" in capsys.readouterr().err
