"""Adapters of the FSDP trainer reach a running embedded engine alone, and are what it serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime.backends.fsdp_utils.hf_export import whole_adapters
from slime.config.checks.file_checks import weight_shapes
from slime.config.lora import ADAPTER
from slime.config.peft_files import linear_modules
from slime.core.errors import WeightSyncError
from slime.core.types import EngineInfo
from slime.rollout.train_data import split_batch
from slime.utils.device import device_id
from slime.utils.engine_keys import remember_key
from slime.weights.adapter_update import AdapterUpdate
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.lora_sync import BASE_VERSION, AdapterSync
from tests.engines import ROOM, TOKEN, assert_scored, engine_server
from tests.fsdp import Case, make_rows, start_actor
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint


def _train(rank: int, case: Case) -> dict[str, Any]:
    """Train an adapter; return it and the trainer's log-probs with and without it."""
    args = case.args()
    actor = start_actor(args, rank, 1)
    rows = split_batch(args, make_rows(), dp_size=1, cp_size=1)[rank]
    actor.train(0, rows)
    rows = split_batch(args, make_rows(), dp_size=1, cp_size=1)[rank]
    return {
        "lora": actor.model.lora,
        "tensors": list(whole_adapters(actor.model, torch.float32)),
        "tokens": [tokens.tolist() for tokens in rows.tokens],
        "masks": rows.loss_masks,
        "actor": actor.log_probs(rows, "actor"),
        "base": actor.log_probs(rows, "ref"),
    }


@pytest.mark.parametrize("through", ["memory", "files", "broadcast"])
def test_the_engine_serves_what_the_trainer_trained(through, tmp_path):
    base = make_tiny_checkpoint(tmp_path / "base", weight_scale=3.0)
    flags = {"lora_rank": 4, "lora_alpha": 32, "lora_merge_for_rollout": True, "lr": 0.02}
    trained = run_fsdp_ranks(_train, 1, Case(model=str(base), flags=flags))[0]
    update = AdapterUpdate(trained["lora"], str(base), trained["tensors"], torch.float32)
    folder = str(tmp_path / "adapters") if through == "files" else None
    with engine_server(base, "--enable-lora", "--max-lora-rank", "8", *ROOM) as server:
        info = EngineInfo(url=server.url, device_ids=(device_id(),), kind="slime")
        group = DistributedTransport(host="127.0.0.1", backend="gloo")
        sync = AdapterSync(
            token=None, folder=folder, group=group if through == "broadcast" else None
        )
        for version in (1, 2):  # a second update replaces the first in place
            report = sync.update(update, [info], version)
        assert report.nbytes == sum(tensor.nbytes for _, tensor in trained["tensors"])
        for name, expected in ((ADAPTER, trained["actor"]), (None, trained["base"])):
            for row, tokens in enumerate(trained["tokens"]):
                assert_scored(server, name, tokens, expected[row], trained["masks"][row])
    differences = [
        np.abs(a - b).max() for a, b in zip(trained["actor"], trained["base"], strict=True)
    ]
    assert max(differences) > 0.01  # else the comparison would prove nothing


def test_adapters_of_experts_arrive_and_all_their_modules_are_bound(tmp_path):
    """One linear module and two parameters of experts in each of two layers: a checksum over all."""
    base = make_tiny_checkpoint(tmp_path / "base", "qwen3_moe", weight_scale=3.0)
    targets = {"lora_target_modules": ["q_proj", "experts"], "lora_experts_shared_outer": True}
    flags = {"lora_rank": 4, "lora_alpha": 32, "lora_merge_for_rollout": True, "lr": 0.02}
    trained = run_fsdp_ranks(_train, 1, Case(model=str(base), flags={**flags, **targets}))[0]
    update = AdapterUpdate(trained["lora"], str(base), trained["tensors"], torch.float32)
    assert len(update.modules) == 2 * 3
    slots = ("--lora-target-modules", "all", "experts", "--max-lora-rank", "4")
    with engine_server(base, *slots, *ROOM) as server:
        info = EngineInfo(url=server.url, device_ids=(device_id(),), kind="slime")
        sync = AdapterSync(token=None)
        for version in (1, 2):  # the second one from the buffer that the engine kept
            sync.update(update, [info], version)
        for name, expected in ((ADAPTER, trained["actor"]), (None, trained["base"])):
            for row, tokens in enumerate(trained["tokens"]):
                assert_scored(server, name, tokens, expected[row], trained["masks"][row])
    with engine_server(base, "--enable-lora", "--max-lora-rank", "4", *ROOM) as server:
        info = EngineInfo(url=server.url, device_ids=(device_id(),), kind="slime")
        with pytest.raises(WeightSyncError, match="--lora-target-modules all experts"):
            AdapterSync(token=None).update(update, [info], 1)


def _send(rank: int, case: Case, engines: list[EngineInfo]) -> dict[str, Any]:
    """Train an adapter and send it twice; return the trainer's log-probs and the bytes of each update."""
    args = case.args()
    remember_key([info.url for info in engines], TOKEN)
    actor = start_actor(args, rank, 1)
    actor.train(0, split_batch(args, make_rows(), dp_size=1, cp_size=1)[rank])
    rows = split_batch(args, make_rows(), dp_size=1, cp_size=1)[rank]
    reports = [actor.update_weights(engines, version) for version in (1, 2)]
    return {
        "nbytes": [report.nbytes for report in reports],
        "tokens": [tokens.tolist() for tokens in rows.tokens],
        "masks": rows.loss_masks,
        "actor": actor.log_probs(rows, "actor"),
        "base": actor.log_probs(rows, "ref"),
    }


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_an_engine_with_another_base_gets_the_trainers_first(transport, tmp_path):
    """Engines of somebody else, and --ref-load: each gets the base once, then adapters alone."""
    base = make_tiny_checkpoint(tmp_path / "base", weight_scale=3.0)
    other = make_tiny_checkpoint(tmp_path / "other", weight_scale=3.0, seed=7)
    with engine_server(other, "--enable-lora", "--max-lora-rank", "8", *ROOM) as server:
        info = EngineInfo(url=server.url, device_ids=("elsewhere",), kind="slime")
        flags = {
            "lora_rank": 4,
            "lr": 0.02,
            "rollout_external_engine_addrs": [server.url],
            "update_weight_transport": transport,
            "run_dir": str(tmp_path / "run"),
        }
        sent = run_fsdp_ranks(_send, 1, Case(model=str(base), flags=flags), [info])[0]
        held = server.get("/model_info")["weight_version"]
        for name, expected in ((ADAPTER, sent["actor"]), (None, sent["base"])):
            assert_scored(server, name, sent["tokens"][0], expected[0], sent["masks"][0])
    assert held == str(BASE_VERSION)
    shapes = weight_shapes(str(base))
    linear, _ = linear_modules(shapes)
    sizes = (sum(shapes[f"{name}.weight"]) for name in linear if "layers" in name)
    adapter = 4 * 4 * sum(sizes)  # fp32, rank 4: the bytes of A and B
    assert sent["nbytes"] == [adapter, adapter]
    left = [path.name for path in (tmp_path / "run" / "weights").glob("adapter_*")]
    assert left == (["adapter_0000002"] if transport == "disk" else [])


def test_a_module_that_the_engine_does_not_bind_is_an_error(tmp_path):
    base = make_tiny_checkpoint(tmp_path / "base", weight_scale=3.0)
    case = Case(model=str(base), flags={"lora_rank": 4, "lora_merge_for_rollout": True})
    trained = run_fsdp_ranks(_train, 1, case)[0]
    renamed = [(name.replace("q_proj", "query"), tensor) for name, tensor in trained["tensors"]]
    update = AdapterUpdate(trained["lora"], str(base), renamed, torch.float32)
    with engine_server(base, "--enable-lora", "--max-lora-rank", "8", *ROOM) as server:
        info = EngineInfo(url=server.url, device_ids=(device_id(),), kind="slime")
        with pytest.raises(WeightSyncError, match="query"):
            AdapterSync(token=None).update(update, [info], 1)
