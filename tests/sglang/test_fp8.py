"""FP8 checkpoints of the converter, and FP8 updates of the trainer, in the real SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime.core.types import EngineInfo
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.fp8 import Fp8Format, convert_to_fp8
from slime.weights.sglang_checksums import model_facts
from slime.weights.sync import WeightSync
from tests.conformance.test_weights import buckets
from tests.engines import TOKEN, EngineServer
from tests.integration.test_engine_fp8 import unpacked
from tests.sglang_server import sglang_server
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.timeout(1800)
IDS = [5, 9, 100, 7]
BLOCKS = Fp8Format(strategy="block", block=(32, 32))
CHANNELS = Fp8Format(strategy="channel")


@torch.no_grad()
def gap(server: EngineServer, model) -> float:
    """How far the log-probs of generated tokens are from those of the model."""
    params = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": IDS, "sampling_params": params, "return_logprob": True}
    entries = server.post("/generate", body)["meta_info"]["output_token_logprobs"]
    tokens = IDS + [entry[1] for entry in entries]
    table = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    places = enumerate(entries, len(IDS) - 1)
    return max(abs(value - float(table[place, token])) for place, (value, token, _) in places)


def converted(folder: Path, layout: Fp8Format, seed: int = 0):
    """A plain checkpoint, the same in 8 bits, and what those stand for as a model."""
    plain = make_tiny_checkpoint(folder / f"plain_{seed}", seed=seed)
    convert_to_fp8(plain, folder / f"fp8_{seed}", layout)
    return plain, folder / f"fp8_{seed}", unpacked(folder / f"fp8_{seed}", plain, layout)


def test_blocks_are_served_and_updated_as_what_they_stand_for(tmp_path):
    _, served, model = converted(tmp_path, BLOCKS)
    plain, _, other = converted(tmp_path, BLOCKS, seed=1)
    with sglang_server(served, "start", sglang_max_total_tokens=8192) as server:
        assert gap(server, model) < 1e-4
        assert gap(server, other) > 1e-2
        facts = model_facts(json.loads((served / "config.json").read_text()))
        transport = DistributedTransport(host="127.0.0.1", backend="gloo")
        sync = WeightSync(transport, token=TOKEN, model=facts)
        # What the trainer has is not quantised; the engine gets what the converter would have written,
        # which its checksums prove.
        sync.update(buckets(plain), [EngineInfo(url=server.url, kind="sglang")], 1)
        assert gap(server, other) < 1e-4


def test_channels_are_served_as_what_they_stand_for(tmp_path):
    _, served, model = converted(tmp_path, CHANNELS)
    flags = {"sglang_max_total_tokens": 8192, "debug_rollout_only": True}
    with sglang_server(served, "start", **flags) as server:
        assert gap(server, model) < 1e-4
