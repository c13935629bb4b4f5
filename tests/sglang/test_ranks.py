"""Engines of two ranks, in one process group of one server and of two servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.core.errors import WeightMismatchError
from slime.core.types import EngineInfo
from slime.utils.sync_http import post_json
from slime.weights.buckets import Bucket
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.sglang_checksums import model_facts
from slime.weights.sync import WeightSync
from slime.weights.transport import WeightTransport
from tests.conformance.reference import greedy
from tests.conformance.test_weights import buckets
from tests.engines import TOKEN
from tests.sglang_server import sglang_server
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.timeout(1800)
# Tensors that are parts of fused parameters, and on how many ranks: the 32 columns of an expert all
# lie on the first, since SGLang fills up the width to 32 per rank on a CPU.
PARTS = {
    "model.layers.0.self_attn.k_proj.weight": ("model.layers.0.self_attn.qkv_proj.weight", 2),
    "model.layers.1.mlp.experts.2.up_proj.weight": ("model.layers.1.mlp.experts.w13_weight", 1),
}


def sync_to(model: Path) -> WeightSync:
    facts = model_facts(json.loads((model / "config.json").read_text()))
    transport = DistributedTransport(host="127.0.0.1", backend="gloo")
    return WeightSync(transport, token=TOKEN, model=facts)


def test_two_ranks_on_two_nodes_take_weights_that_are_compared_bit_by_bit(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", "qwen3_moe", weight_scale=3.0)
    other = make_tiny_checkpoint(tmp_path / "other", "qwen3_moe", weight_scale=3.0, seed=1)
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    with sglang_server(model, "start", ranks=2, nodes=2, sglang_max_total_tokens=8192) as server:

        def answer() -> list[int]:
            body = {"input_ids": [10, 20, 30], "sampling_params": params}
            return post_json(f"{server.url}/generate", body, timeout=120)["output_ids"]

        assert answer() == greedy(model, [10, 20, 30], 12)
        info = EngineInfo(url=server.url, kind="sglang", device_ids=("cpu", "cpu"))
        sync = sync_to(model)
        sync.update(buckets(other), [info], 1)
        assert answer() == greedy(other, [10, 20, 30], 12)
        original = sync.transport
        for version, (name, (held, count)) in enumerate(PARTS.items(), 2):
            sync.transport = Tampering(original, name)
            words = rf"{count} of \d+ parameters differ \({held}"
            with pytest.raises(WeightMismatchError, match=words):
                sync.update(buckets(model), [info], version)


class Tampering:
    """What arrives is not what was sent: one tensor is another."""

    shares_device = False

    def __init__(self, transport: WeightTransport, name: str) -> None:
        self._transport, self._name = transport, name
        self.open, self.finish, self.close = transport.open, transport.finish, transport.close
        self.reclaim, self.allocate = transport.reclaim, transport.allocate

    def send(self, bucket: Bucket) -> None:
        tensors = [(n, t + 1e-3 if n == self._name else t) for n, t in bucket.tensors]
        self._transport.send(Bucket(index=bucket.index, tensors=tensors))
