"""Experts that share their outer matrices on Megatron, and adapters of experts in a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.lora import ADAPTER
from slime.core.errors import UserError
from slime.core.types import EngineInfo
from slime.utils.device import device_id
from slime.weights.adapter_update import AdapterUpdate
from slime.weights.buckets import hf_views
from slime.weights.lora_sync import AdapterSync
from tests.engines import ROOM, assert_scored, engine_server
from tests.fsdp import Case
from tests.megatron import (
    CP,
    EP,
    ETP1,
    OVERLAP,
    SP,
    VPP,
    first_gradient,
    megatron_args,
    my_rows,
    start_actor,
    whole_adapters,
    whole_weights,
)
from tests.peft_runs import (
    BUDGET,
    INNER,
    KL,
    OUTER,
    Repeated,
    peft_case,
    peft_model,
    shared_outcome,
    with_shared_outer,
)
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

RANK, NUM_EXPERTS = 3, 4
CONFIG = {
    "r": RANK,
    "lora_alpha": 9,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "EP2": (2, EP),
    "EP2 distributed optimizer": (2, {**EP, **OVERLAP}),
    "DP2 distributed optimizer": (2, OVERLAP),
    "TP2 SP": (2, SP),
    "TP2 SP EP2": (2, {**SP, **EP, **ETP1}),
    "TP2 SP EP2 ETP2": (4, {**SP, **EP}),
    "VPP": (2, VPP),
    "CP2": (2, CP),
}


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("separate")
    options = {"weight_scale": 3.0, "num_hidden_layers": 4}
    model = make_tiny_checkpoint(folder / "model", "qwen3_moe", num_experts=NUM_EXPERTS, **options)
    return peft_case(str(model), folder / "adapter", CONFIG, {**KL, **BUDGET})


@pytest.fixture(scope="module")
def shared(separate: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return with_shared_outer(separate, tmp_path_factory.mktemp("shared"), NUM_EXPERTS)


@pytest.fixture(scope="module")
def naive(shared: Case) -> Any:
    return shared_outcome(shared, RANK, NUM_EXPERTS)


@pytest.fixture(scope="module")
def trained(shared: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder, found = tmp_path_factory.mktemp("trained"), {}
    for ranks in (1, 2, 4):
        names = [name for name, layout in LAYOUTS.items() if layout[0] == ranks]
        of_ranks = run_megatron_ranks(_train_all, ranks, ranks, names, shared, str(folder))
        found |= {name: [outcomes[name] for outcomes in of_ranks] for name in names}
    return found


def _train_all(rank: int, world_size: int, names: list[str], case: Case, folder: str) -> dict:
    found = {}
    for name in names:
        args = megatron_args(case, world_size, LAYOUTS[name][1])
        actor = start_actor(args, rank, world_size)
        is_whole = not args.use_distributed_optimizer
        grads = first_gradient(actor, whole_adapters) if is_whole else None
        for rollout_id in range(2):
            actor.train(rollout_id, my_rows(actor, rollout_id))
        actor.export_hf(f"{folder}/{name}")
        found[name] = {
            "grads": grads,
            "weights": whole_adapters(actor),
            "merged": whole_weights(actor),
            "export": f"{folder}/{name}",
        }
    return found


def _shared_part(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The matrix that experts share, which PEFT's file has once per expert."""
    for end, dim in ((INNER, 0), (OUTER, 1)):
        if name.endswith(f"{end}.weight"):
            repeated = Repeated(NUM_EXPERTS, dim, RANK)
            one = repeated.right_inverse(tensor)
            assert torch.equal(repeated(one), tensor), name
            return one
    return tensor


@pytest.mark.parametrize("name", LAYOUTS)
def test_shared_matrices_are_trained_like_one(name, trained, naive):
    """Their gradient is the sum over all experts, tokens and ranks."""
    for rank in trained[name]:
        assert rank["weights"].keys() == naive.weights.keys()
        for parameter, expected in naive.weights.items():
            ours = _shared_part(parameter, rank["weights"][parameter])
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        for parameter, gradient in (rank["grads"] or {}).items():
            expected = naive.grads[parameter]
            ours, scale = _shared_part(parameter, gradient), expected.abs().max()
            torch.testing.assert_close(ours / scale, expected / scale, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_peft_loads_the_export_and_its_merge_is_what_engines_get(name, trained, shared):
    found = trained[name][0]
    merged = peft_model(shared, found["export"]).merge_and_unload().state_dict()
    for parameter, weight in hf_views(merged.items(), model_type="qwen3_moe"):
        torch.testing.assert_close(found["merged"][parameter], weight, rtol=1e-5, atol=1e-6)


def _refused(rank: int, case: Case, path: str) -> str:
    args = megatron_args(case, 2, EP, lora_adapter_path=path)
    with pytest.raises(UserError) as error:
        start_actor(args, rank, 2)
    return str(error.value)


def test_a_folder_whose_experts_differ_cannot_start_shared_ones(shared, separate):
    path = separate.flags["lora_adapter_path"]
    for message in run_megatron_ranks(_refused, 2, shared, path):
        assert "lora_A.weight of --lora-adapter-path differs between experts" in message


# ---- engines


def _train_for_engine(rank: int, case: Case) -> dict[str | None, Any]:
    actor = start_actor(megatron_args(case, 2, EP), rank, 2)
    actor.train(0, my_rows(actor, 0))
    rows = my_rows(actor, 0)
    return {
        "lora": actor.adapters.lora,
        "tensors": list(whole_adapters(actor).items()),
        "tokens": [tokens.tolist() for tokens in rows.tokens],
        "masks": rows.loss_masks,
        ADAPTER: actor.log_probs(rows, "actor"),
        None: actor.log_probs(rows, "ref"),
    }


@pytest.mark.parametrize("is_shared", [False, True], ids=["per expert", "shared"])
def test_an_engine_serves_experts_trained_on_two_expert_ranks(is_shared, tmp_path: Path):
    """Each rank has its own rows; a checksum and the bound modules are compared in the update."""
    base = make_tiny_checkpoint(tmp_path / "base", "qwen3_moe", weight_scale=3.0)
    targets = {"lora_target_modules": ["q_proj", "experts"]}
    flags = {"lora_rank": 4, "lora_alpha": 32, "lora_merge_for_rollout": True, "lr": 0.02}
    flags |= {**targets, "lora_experts_shared_outer": is_shared}
    trained = run_megatron_ranks(_train_for_engine, 2, Case(model=str(base), flags=flags))
    lora, tensors = trained[0]["lora"], trained[0]["tensors"]
    update = AdapterUpdate(lora, str(base), tensors, torch.float32)
    assert len(update.modules) == 2 * 3
    slots = ("--lora-target-modules", "all", "experts", "--max-lora-rank", "4")
    with engine_server(base, *slots, *ROOM) as server:
        info = EngineInfo(url=server.url, device_ids=(device_id(),), kind="slime")
        AdapterSync(token=None).update(update, [info], 1)
        for found in trained:
            for name in (ADAPTER, None):
                for row, tokens in enumerate(found["tokens"]):
                    assert_scored(server, name, tokens, found[name][row], found["masks"][row])
    changed = [
        abs(a - b).max() for one in trained for a, b in zip(one[ADAPTER], one[None], strict=True)
    ]
    assert max(changed) > 0.01  # else the comparison would prove nothing
