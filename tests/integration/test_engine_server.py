"""The engine's server when it cannot start: one sentence, no traceback."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from slime.engine.server.__main__ import main
from tests.forked import run_python
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("m"))


def test_a_taken_port_ends_the_process_with_one_sentence(checkpoint: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["-m", "slime.engine.server", "--model-path", str(checkpoint), "--port", port]
        result = run_python(command)
    assert result.returncode == 1
    assert result.stderr.startswith(f"cannot listen at 127.0.0.1:{port}")
    assert result.stderr.count("\n") == 1


def test_bad_starts_have_one_clear_message(checkpoint: Path, tmp_path: Path, capsys):
    encoder = tmp_path / "t5"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    no_tokenizer = make_tiny_checkpoint(tmp_path / "m", with_tokenizer=False)
    cases = [
        (["--model-path", str(tmp_path / "none")], 1, "does not exist"),
        (["--model-path", str(tmp_path)], 1, "no config.json"),
        (["--model-path", str(encoder)], 1, "'t5' is not a causal language model"),
        (["--model-path", str(no_tokenizer)], 1, "--skip-tokenizer-init"),
        (
            ["--model-path", str(checkpoint), "--enable-lora-overlap-loading"],
            2,
            "--enable-lora-overlap-loading",
        ),
        (["--model-path", str(checkpoint), "--tp-size", "2"], 2, "--tp-size"),
        (
            ["--model-path", str(checkpoint), "--page-size", "0"],
            2,
            "--page-size must be at least 1",
        ),
        ([], 2, "--model-path"),
    ]
    for options, status, message in cases:
        capsys.readouterr()
        assert main([*options, "--port", "0"]) == status
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
