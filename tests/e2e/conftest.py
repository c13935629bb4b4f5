from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", weight_scale=2.0)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"input": f"{a}+{b}=", "label": str(a + b)} for a in range(5) for b in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
