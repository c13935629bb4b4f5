"""The expert choices that the engine returns are those of Hugging Face's routers on the same tokens."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.core.errors import UserError
from slime.core.types import decode_experts
from slime.utils.sync_http import post_json
from tests.engines import TOKEN, LocalEngine, engine_server
from tests.tiny import make_tiny_checkpoint

LAYERS, TOP = 3, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "m"
    return make_tiny_checkpoint(folder, "qwen3_moe", num_hidden_layers=LAYERS)


def test_choices_are_hugging_faces_with_and_without_a_cached_prefix(checkpoint: Path):
    prompt = list(range(40, 80))
    with engine_server(checkpoint, "--enable-return-routed-experts", "--page-size", "4") as server:
        replies = [_ask(server.url, prompt), _ask(server.url, prompt)]
    assert replies[0]["meta_info"]["cached_tokens"] == 0
    assert replies[1]["meta_info"]["cached_tokens"] > 0
    for reply in replies:
        tokens = prompt + reply["output_ids"]
        experts = decode_experts(str(checkpoint), reply["meta_info"]["routed_experts"])
        assert experts.shape == (len(tokens) - 1, LAYERS, TOP)
        np.testing.assert_array_equal(np.sort(experts), np.sort(_hugging_faces(checkpoint, tokens)))


def test_nothing_is_returned_unasked(checkpoint: Path):
    with engine_server(checkpoint, "--enable-return-routed-experts") as server:
        reply = _ask(server.url, [1, 2, 3], return_routed_experts=False)
    assert "routed_experts" not in reply["meta_info"]


def test_a_model_without_experts_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="has no routers"):
        LocalEngine(make_tiny_checkpoint(tmp_path / "m"), enable_return_routed_experts=True)


def _ask(url: str, prompt: list[int], **more: object) -> dict:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_routed_experts": True, **more}
    return post_json(f"{url}/generate", body, token=TOKEN)


def _hugging_faces(checkpoint: Path, tokens: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = [layer.reshape(len(tokens), -1).topk(TOP, dim=-1).indices for layer in logits]
    return torch.stack(chosen, dim=1)[:-1].numpy()


def test_decoding_reads_what_was_written(checkpoint: Path):
    experts = np.arange(2 * LAYERS * TOP, dtype=np.int32).reshape(2, LAYERS, TOP)
    text = base64.b64encode(experts).decode()
    np.testing.assert_array_equal(decode_experts(str(checkpoint), text), experts)
