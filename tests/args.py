"""Arguments for tests: a small valid run on this machine, with whatever a test wants changed."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from slime.config.arguments import Args, parse_args
from slime.config.flags.registry import all_flags
from slime.config.flags.spec import option_of


def make_args(**overrides: Any) -> Args:
    """What parse_args gives for a minimal command line with `overrides`, by attribute name.

    `make_args(lr=1e-3, colocate=True, rollout_stop=["a", "b"])`; None leaves a flag out, False turns
    a switch off.
    """
    return parse_args(make_argv(**overrides))


def make_argv(**overrides: Any) -> list[str]:
    folder = _folder()
    values: dict[str, Any] = {
        "train_backend": "fsdp",
        "rollout_engine": "slime",
        "hf_checkpoint": str(folder / "model"),
        "prompt_data": [str(folder / "prompts.jsonl")],
        "run_dir": str(folder / "run"),
        "num_rollout": 2,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
        "rm_type": "random",
        **overrides,
    }
    if values.get("num_epoch") is not None and "num_rollout" not in overrides:
        values["num_rollout"] = None
    return [part for name, value in values.items() for part in _parts(name, value)]


def _parts(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [option_of(name) if value else all_flags()[name].off_options[0]]
    if isinstance(value, dict):
        return [option_of(name), json.dumps(value)]
    if isinstance(value, list | tuple):
        return [option_of(name), *map(str, value)]
    return [f"{option_of(name)}={value}"]


@cache
def _folder() -> Path:
    """A model folder with a config only, and one prompt: enough for the checks of files."""
    folder = Path(tempfile.mkdtemp(prefix="slime-args-"))
    (folder / "model").mkdir()
    config = {"model_type": "qwen3", "max_position_embeddings": 1024}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return folder
