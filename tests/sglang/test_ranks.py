"""Engines of two ranks, in one process group of one server and of two servers."""

from __future__ import annotations

import pytest

from slime.backends.weight_sync.distributed import DistributedTransport
from slime.backends.weight_sync.sync import WeightSync
from slime.utils.sync_http import post_json
from slime.utils.types import EngineInfo
from tests.conformance.reference import greedy
from tests.conformance.test_weights import buckets
from tests.engines import TOKEN
from tests.sglang_server import sglang_server
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_ranks_generate_and_take_weights(model, tmp_path, nodes):
    other = make_tiny_checkpoint(tmp_path / "other", seed=1)
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    with sglang_server(model, "start", ranks=2, nodes=nodes) as server:

        def answer() -> list[int]:
            body = {"input_ids": [10, 20, 30], "sampling_params": params}
            return post_json(f"{server.url}/generate", body, timeout=120)["output_ids"]

        assert answer() == greedy(model, [10, 20, 30], 12)
        transport = DistributedTransport(host="127.0.0.1", backend="gloo")
        info = EngineInfo(url=server.url, kind="sglang", device_ids=("cpu", "cpu"))
        WeightSync(transport, token=TOKEN).update(buckets(other), [info], 1)
        assert answer() == greedy(other, [10, 20, 30], 12)
