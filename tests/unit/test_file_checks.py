"""A broken model folder or a folder that cannot be written to is found from its files, in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.config.checks.file_checks import (
    check_chat_template,
    check_tokenizer,
    check_weights,
    check_writable,
    read_config_json,
)
from slime.config.flags.draft import Draft
from slime.core.errors import ConfigError
from tests.tiny import make_byte_tokenizer

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, one of them with the empty header that a pipeline's odd stage may write."""
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, tmp_path / "model-1.safetensors")
    save_file({}, tmp_path / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_weights(str(folder))
    message = str(caught.value)
    assert message.startswith("--hf-checkpoint: ") and "\n" not in message
    return message


def test_whole_weights_pass_with_an_index_and_without(folder):
    check_weights(str(folder))
    (folder / INDEX).unlink()
    check_weights(str(folder))


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_file_that_was_cut_off(folder, kept):
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file} " in refusal(folder)


def test_a_missing_shard_a_pointer_and_a_broken_index(folder):
    shard = folder / "model-2.safetensors"
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert "Git LFS pointer" in refusal(folder)
    shard.unlink()
    assert f"{shard} does not exist" in refusal(folder)
    (folder / INDEX).write_text("{")
    assert str(folder / INDEX) in refusal(folder)


@pytest.mark.parametrize(
    "header",
    [
        '{"a": {"data_offsets": []}}',
        '{"a": {"data_offsets": [0, "12"]}}',
        '{"a": {}}',
        "[" * 100_000,
    ],
)
def test_a_header_that_cannot_be_read(folder, header):
    file = folder / "model-1.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert f"{file} is not a safetensors file: its header cannot be read" in refusal(folder)


def test_a_config_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not JSON: maximum recursion depth"):
        read_config_json(Draft({"hf_checkpoint": str(tmp_path)}, {}, gpus=0))


def test_a_folder_without_a_tokenizer(folder):
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        check_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    check_tokenizer(str(folder))


def test_a_tokenizer_without_a_chat_template(tmp_path):
    """As transformers itself writes them: inside the configuration before, in a file of its own now."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"none has no chat template; remove the flag"):
        check_chat_template(str(tmp_path / "none"))
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "file")
    check_chat_template(str(tmp_path / "file"))
    tokenizer.save_pretrained(tmp_path / "inside", save_jinja_files=False)
    check_chat_template(str(tmp_path / "inside"))


def test_folders_that_can_and_cannot_be_written_to(tmp_path):
    check_writable(tmp_path / "a" / "b", "--save")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--save .*file is a file"):
        check_writable(tmp_path / "file", "--save")
    with pytest.raises(ConfigError, match=r"--save .*cannot be written to: Not a directory"):
        check_writable(tmp_path / "file" / "under", "--save")
