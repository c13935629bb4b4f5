"""Prompt files and arguments for tests of the rollout side; the tokenizer maps bytes to tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.config.arguments import Args
from slime.core.types import Sample
from slime.rollout.base_types import RolloutFnTrainOutput
from tests.args import make_args
from tests.tiny import make_byte_tokenizer


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int) -> list[dict[str, str]]:
    """`{"input": "3+1=", "label": "4"}` and so on."""
    return [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(count)]


def make_tokenizer_folder(folder: Path, chat_template: str | None = None) -> Path:
    """A checkpoint folder with a tokenizer and a config, but no weights."""
    tokenizer = make_byte_tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    config = {"model_type": "qwen3", "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rollout_args(tmp_path: Path, rows: list[Any] | None = None, **overrides: Any) -> Args:
    """Arguments over a data file with `rows` (default: ten sums with labels)."""
    folder = tmp_path / "model"
    if not folder.exists():
        make_tokenizer_folder(folder)
    data = write_rows(tmp_path / "train.jsonl", sums(10) if rows is None else rows)
    values: dict[str, Any] = {
        "hf_checkpoint": str(folder),
        "prompt_data": [str(data)],
        "label_key": "label",
        "rollout_max_response_len": 32,
        **overrides,
    }
    return make_args(**values)


def flat(output: RolloutFnTrainOutput) -> list[Sample]:
    return [sample for group in output.samples for sample in group]
