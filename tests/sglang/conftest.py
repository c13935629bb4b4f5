"""Runs through the real SGLang; skipped where SLIME_SGLANG_PYTHON does not say which one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sglang_server import HERE
from tests.tiny import make_tiny_checkpoint

if not HERE:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", weight_scale=2.0)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def server(real_sglang):
    """One that the runs use without having started it."""
    return real_sglang
