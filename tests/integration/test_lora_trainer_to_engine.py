"""Adapters of the FSDP trainer reach a running embedded engine alone, and are what it serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime.backends.fsdp_utils.hf_export import whole_adapters
from slime.core.errors import WeightSyncError
from slime.core.types import EngineInfo
from slime.rollout.train_data import split_batch
from slime.utils.device import device_id
from slime.weights.lora_sync import ADAPTER, AdapterSync, adapter_update
from tests.engines import ROOM, engine_server
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


@pytest.mark.parametrize("through", ["memory", "files"])
def test_the_engine_serves_what_the_trainer_trained(through, tmp_path):
    base = make_tiny_checkpoint(tmp_path / "base", weight_scale=3.0)
    flags = {"lora_rank": 4, "lora_alpha": 32, "lora_merge_for_rollout": True, "lr": 0.02}
    trained = run_fsdp_ranks(_train, 1, Case(model=str(base), flags=flags))[0]
    update = adapter_update(trained["lora"], str(base), trained["tensors"], torch.float32)
    folder = str(tmp_path / "adapters") if through == "files" else None
    with engine_server(base, "--enable-lora", "--max-lora-rank", "8", *ROOM) as server:
        info = EngineInfo(url=server.url, device_ids=(device_id(),), kind="slime")
        sync = AdapterSync(token=None, folder=folder)
        for version in (1, 2):  # a second update replaces the first in place
            report = sync.update(update, [info], version)
        assert report.nbytes == sum(tensor.nbytes for _, tensor in trained["tensors"])
        for name, expected in ((ADAPTER, trained["actor"]), (None, trained["base"])):
            for row, tokens in enumerate(trained["tokens"]):
                _assert_scored(server, name, tokens, expected[row], trained["masks"][row])
    differences = [
        np.abs(a - b).max() for a, b in zip(trained["actor"], trained["base"], strict=True)
    ]
    assert max(differences) > 0.01  # else the comparison would prove nothing


def _assert_scored(server, name: str | None, tokens: list[int], expected, mask) -> None:
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "lora_path": name,
    }
    reply = server.post("/generate", body)
    found = [entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]]
    scored = np.array(found[-len(expected) :]) * mask
    np.testing.assert_allclose(scored, expected, rtol=0, atol=2e-4)


def test_a_module_that_the_engine_does_not_bind_is_an_error(tmp_path):
    base = make_tiny_checkpoint(tmp_path / "base", weight_scale=3.0)
    case = Case(model=str(base), flags={"lora_rank": 4, "lora_merge_for_rollout": True})
    trained = run_fsdp_ranks(_train, 1, case)[0]
    renamed = [(name.replace("q_proj", "query"), tensor) for name, tensor in trained["tensors"]]
    update = adapter_update(trained["lora"], str(base), renamed, torch.float32)
    with engine_server(base, "--enable-lora", "--max-lora-rank", "8", *ROOM) as server:
        info = EngineInfo(url=server.url, device_ids=(device_id(),), kind="slime")
        with pytest.raises(WeightSyncError, match="query"):
            AdapterSync(token=None).update(update, [info], 1)
