"""Asking servers that somebody else runs, the embedded engine's and the real SGLang's alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.serving.external import find_external
from tests.args import make_args
from tests.tiny import make_tiny_checkpoint


def external(model: Path, *addresses: str) -> Args:
    return make_args(
        rollout_engine=None,
        hf_checkpoint=str(model),
        rollout_external=True,
        rollout_external_engine_addrs=list(addresses),
    )


def check_refusals(url: str, folder: Path) -> None:
    """A server of a tiny Qwen3 is refused for another model, and for another tokenizer."""
    other = make_tiny_checkpoint(folder / "llama", "llama")
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*start it with the model"):
        find_external(external(other, url))
    spelled = make_tiny_checkpoint(folder / "spelled")
    path = spelled / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["c"] = vocab["c"], vocab["a"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="another tokenizer"):
        find_external(external(spelled, url))
