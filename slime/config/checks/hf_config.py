"""The model's config.json, read as it is: no transformers, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.config.flags.draft import Draft
from slime.core.errors import ConfigError


def read_hf_config(draft: Draft) -> dict[str, Any]:
    """The text model's part of config.json; empty when there is none (the file check says so)."""
    folder = draft["hf_checkpoint"]
    path = Path(folder) / "config.json" if folder else None
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"--hf-checkpoint: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-checkpoint: {path} does not hold a model's settings")
    return config.get("text_config", config)
