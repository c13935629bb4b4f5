"""Adapters trained by the Megatron backend are those that `peft` trains, in any layout and file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from slime.core.errors import UserError
from slime.core.types import CriticColumns
from slime.weights.buckets import hf_views
from tests import fsdp
from tests.fsdp import Case, Outcome, make_rows, naive_log_probs
from tests.megatron import (
    CP,
    DIST_OPT,
    EP,
    ETP1,
    FULL_RECOMPUTE,
    OVERLAP,
    PP,
    SP,
    TP,
    VPP,
    megatron_args,
    my_rows,
    start_actor,
)
from tests.parity.tiny_families import make_family
from tests.peft_runs import BUDGET, KL, hf_names, peft_case, peft_model, peft_outcome
from tests.rank_pool import run_fsdp_ranks, run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

# family, configuration of peft, flags of the run
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": (
        "qwen3",
        {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"},
        {**KL, **BUDGET, "global_batch_size": 4},
    ),
    "llama": (
        "llama",
        {"r": 3, "target_modules": ["q_proj", "up_proj", "down_proj"], "use_rslora": True},
        {"micro_batch_size": 3},
    ),
    "qwen3_moe": ("qwen3_moe", {"r": 4, "target_modules": ["q_proj", "o_proj"]}, BUDGET),
    "latent attention": (
        "deepseek_v3",
        {
            "r": 2,
            "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        },
        BUDGET,
    ),
    "one module for gate and up": ("glm4", {"r": 2, "target_modules": "all-linear"}, BUDGET),
}
# ranks, setting, layout
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "qwen3", {}),
    "one rank, llama, recomputed": (1, "llama", FULL_RECOMPUTE),
    "one rank, MoE": (1, "qwen3_moe", {}),
    "TP2": (2, "qwen3", TP),
    "TP2 SP": (2, "qwen3", SP),
    "TP2 SP, llama, recomputed": (2, "llama", {**SP, **FULL_RECOMPUTE}),
    "PP2": (2, "qwen3", PP),
    "VPP": (2, "qwen3", VPP),
    "CP2": (2, "qwen3", CP),
    "DP2 distributed optimizer": (2, "qwen3", OVERLAP),
    "EP2": (2, "qwen3_moe", EP),
    "TP2 SP EP2": (2, "qwen3_moe", {**SP, **EP, **ETP1}),
    "TP2 SP, latent attention": (2, "latent attention", SP),
    "TP2 SP, one module for gate and up": (2, "one module for gate and up", SP),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Each starts from a PEFT folder that `peft` wrote, with A and B other than zero."""
    folder, found = tmp_path_factory.mktemp("lora"), {}
    for name, (family, config, flags) in SETTINGS.items():
        model = _make_model(folder / family, family)
        found[name] = peft_case(model, folder / "adapters" / name, config, flags)
    return found


@pytest.fixture(scope="module")
def naive(cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: peft_outcome(case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def trained(cases, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    folder, found = tmp_path_factory.mktemp("trained"), {}
    for ranks in (1, 2):
        names = [name for name, layout in LAYOUTS.items() if layout[0] == ranks]
        of_ranks = run_megatron_ranks(_train_all, ranks, ranks, names, cases, str(folder))
        found |= {name: [outcomes[name] for outcomes in of_ranks] for name in names}
    return found


def _make_model(folder: Path, family: str) -> str:
    if family in ("glm4", "deepseek_v3"):
        return str(make_family(folder, family, vocab_size=320))
    return str(make_tiny_checkpoint(folder, family, weight_scale=3.0, num_hidden_layers=4))


def _train_all(
    rank: int, world_size: int, names: list[str], cases: dict[str, Case], folder: str
) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        _, setting, layout = LAYOUTS[name]
        args = megatron_args(cases[setting], world_size, layout)
        found[name] = _train(args, rank, world_size, f"{folder}/{name}")
    return found


def _train(args: Any, rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train twice; return the outcome, what the engines would get, and what was exported."""
    actor = start_actor(args, rank, world_size)
    before = _state(actor)
    grads = None if args.use_distributed_optimizer else _first_gradient(actor)
    for rollout_id in range(2):
        actor.train(rollout_id, my_rows(actor, rollout_id))
    after = _state(actor)
    actor.export_hf(folder)
    rows = my_rows(actor, 0)
    return {
        "grads": grads,
        "weights": _adapters(actor),
        "changed": {name for name, t in before.items() if not torch.equal(t, after[name])},
        "trained": {n for c in actor.chunks for n, p in c.named_parameters() if p.requires_grad},
        "num_states": sum(param.numel() for param, _ in actor.optimizer.moments()),
        "merged": {n: t.clone() for bucket in actor.hf_buckets() for n, t in bucket},
        "rows": rows,
        "log_probs": actor.log_probs(rows, "actor"),
        "export": folder,
    }


def _state(actor: Any) -> dict[str, torch.Tensor]:
    """Parameters by name, of the first chunk of this rank, where names of chunks are the same."""
    return {n: p.detach().clone() for n, p in actor.chunks[0].named_parameters()}


def _adapters(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.adapters.whole()}


def _first_gradient(actor: Any) -> dict[str, torch.Tensor]:
    batch = my_rows(actor, 0)
    if actor.needs_ref:
        batch.ref_log_probs = actor.log_probs(batch, "ref")
    if actor.needs_old(batch):
        batch.old_log_probs = actor.log_probs(batch, "actor")
    actor.advantages(0, batch)
    actor.forward_backward(next(actor.steps(batch)))
    params = [p for chunk in actor.chunks for p in chunk.parameters() if p.requires_grad]
    weights = [p.detach().clone() for p in params]
    with torch.no_grad():
        for param in params:
            param.copy_(param.main_grad)
        grads = _adapters(actor)
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    return grads


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_peft(name, trained, naive):
    ours, theirs = trained[name][0]["grads"], naive[LAYOUTS[name][1]].grads
    if ours is None:
        return  # the distributed optimizer holds shards; adapters after training compare them
    assert ours.keys() == theirs.keys()
    for parameter, expected in theirs.items():
        scale = expected.abs().max()
        torch.testing.assert_close(ours[parameter] / scale, expected / scale, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_after_training_are_those_of_peft(name, trained, naive):
    theirs = naive[LAYOUTS[name][1]].weights
    for rank in trained[name]:
        assert rank["weights"].keys() == theirs.keys()
        for parameter, expected in theirs.items():
            torch.testing.assert_close(rank["weights"][parameter], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_adapters_move_and_have_optimizer_state(name, trained, naive):
    ranks = trained[name]
    for rank in ranks:
        assert rank["changed"] and rank["changed"] <= rank["trained"]
        assert all(".lora." in parameter for parameter in rank["trained"])
    if "TP" not in name and "DP" not in name and "EP" not in name and "CP" not in name:
        states = sum(rank["num_states"] for rank in ranks)
        assert states == sum(t.numel() for t in naive[LAYOUTS[name][1]].weights.values())


@pytest.mark.parametrize("name", LAYOUTS)
def test_peft_loads_the_export_and_its_merge_is_what_engines_get(name, trained, cases):
    case, found = cases[LAYOUTS[name][1]], trained[name][0]
    peft = peft_model(case, found["export"])
    held = hf_names(dict(peft.named_parameters()))
    for parameter, ours in found["weights"].items():
        assert torch.equal(held[parameter], ours), parameter
    model = peft.merge_and_unload()
    merged = dict(hf_views(model.state_dict().items(), model_type=model.config.model_type))
    for parameter, sent in found["merged"].items():
        torch.testing.assert_close(sent, merged[parameter], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_are_those_of_peft_after_training(name, trained, cases):
    case = cases[LAYOUTS[name][1]]
    peft, rows = peft_model(case, trained[name][0]["export"]), make_rows(0)
    with torch.no_grad():
        theirs = [naive_log_probs(peft, rows, i, case.args())[0] for i in range(len(rows))]
    order = {tuple(tokens): i for i, tokens in enumerate(map(tuple, rows.tokens))}
    for rank in trained[name]:
        for row, column in enumerate(rank["log_probs"]):
            expected = theirs[order[tuple(rank["rows"].tokens[row])]].numpy()
            expected = expected * rank["rows"].loss_masks[row]
            np.testing.assert_allclose(column, expected, rtol=0, atol=2e-5)


# ---- a new adapter: B = 0


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Dropout must not show outside the training pass."""
    folder = tmp_path_factory.mktemp("fresh")
    model = make_tiny_checkpoint(folder / "model", weight_scale=3.0)
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, "lora_dropout": 0.25, **KL, **BUDGET}
    return Case(model=str(model), flags=flags)


def _start_fresh(rank: int, world_size: int, case: Case, layout: dict[str, Any]) -> dict[str, Any]:
    args = megatron_args(case, world_size, layout)
    actor = start_actor(args, rank, world_size)
    rows = my_rows(actor, 0)
    adapters, same = _adapters(actor), [actor.log_probs(rows, m) for m in ("actor", "ref")]
    sent = {n: t.clone() for bucket in actor.hf_buckets() for n, t in bucket}
    actor.train(0, my_rows(actor, 0))
    after = [actor.log_probs(rows, m) for m in ("actor", "ref")]
    plain = Case(model=case.model, flags={**BUDGET, "bf16": args.precision == "bf16"})
    base = start_actor(megatron_args(plain, world_size, layout), rank, world_size)
    near = base.log_probs(rows, "actor")
    base_weights = {n: t for bucket in base.hf_buckets() for n, t in bucket}
    expected = same[1]
    return {
        "equal": all(map(np.array_equal, *same)),
        "gap": max(float(np.abs(a - b).max()) for a, b in zip(expected, near, strict=True)),
        "sent_is_base": all(torch.equal(t, base_weights[n]) for n, t in sent.items()),
        "adapters": adapters,
        "after": [all(map(np.array_equal, one, expected)) for one in after],
        "frozen": list(actor.frozen),
        "dtypes": {(".lora." in n, p.dtype) for n, p in actor.chunks[0].named_parameters()},
    }


@pytest.mark.parametrize("ranks, layout", [(1, FULL_RECOMPUTE), (2, SP), (2, TP)])
def test_a_new_adapter_changes_no_bit_of_the_base(fresh, ranks, layout):
    for found in run_megatron_ranks(_start_fresh, ranks, ranks, fresh, {**layout, **DIST_OPT}):
        assert found["equal"] and found["sent_is_base"]
        assert found["gap"] <= 2e-6  # of a run without LoRA, whose weights lie elsewhere in memory
        assert found["frozen"] == []  # the reference is the base: no second copy
        assert found["after"] == [False, True]


def test_in_bf16_the_base_is_held_in_bf16_and_adapters_in_fp32(fresh):
    case = replace(fresh, flags={**fresh.flags, "bf16": True})
    for found in run_megatron_ranks(_start_fresh, 2, 2, case, SP):
        assert found["dtypes"] == {(False, torch.bfloat16), (True, torch.float32)}
        assert found["equal"] and found["gap"] == 0.0 and found["sent_is_base"]
        assert found["after"] == [False, True]


def _fsdp_adapters(rank: int, case: Case) -> dict[str, torch.Tensor]:
    actor = fsdp.start_actor(case.args(), rank, 1)
    return {n: t for n, t in fsdp.whole_weights(actor).items() if ".lora_" in n}


def _megatron_adapters(rank: int, world_size: int, case: Case) -> dict[str, torch.Tensor]:
    return _adapters(start_actor(megatron_args(case, world_size, SP), rank, world_size))


def test_a_new_adapter_is_that_of_the_fsdp_trainer(fresh):
    theirs = run_fsdp_ranks(_fsdp_adapters, 1, fresh)[0]
    for ours in run_megatron_ranks(_megatron_adapters, 2, 2, fresh):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
            assert bool(value.any()) == ("lora_A" in name)


# ---- checkpoints


def _resume(
    rank: int, case: Case, other: Case, path: str, layouts: list[dict[str, Any]]
) -> dict[str, Any]:
    """Save after the first rollout; actors in both layouts load it and train on the second."""
    first = start_actor(megatron_args(case, 2, layouts[0]), rank, 2)
    first.train(0, my_rows(first, 0))
    saved = _adapters(first)
    if rank == 0:
        Path(path).mkdir()
    torch.distributed.barrier()
    first.save_to(path, 0)
    first.train(1, my_rows(first, 1))
    expected, resumed = _adapters(first), []
    for layout in layouts:
        actor = start_actor(megatron_args(case, 2, layout), rank, 2, checkpoint=path)
        loaded = _adapters(actor)
        actor.train(1, my_rows(actor, 1))
        resumed.append({"loaded": loaded, "stepped": _adapters(actor)})
    others = megatron_args(other, 2, layouts[0])
    return {
        "saved": saved,
        "expected": expected,
        "resumed": resumed,
        "refused": _error(lambda: start_actor(others, rank, 2, checkpoint=path)),
    }


def _error(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as found:
        action()
    return str(found.value)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_holds_adapters_alone_and_resumes_in_another_layout(fresh, tmp_path, bf16):
    """Bit for bit in its own layout; dropout is off, since its masks depend on the layout."""
    flags = {**fresh.flags, "lora_dropout": 0.0, "bf16": bf16}
    other_base = make_tiny_checkpoint(tmp_path / "other", seed=5, weight_scale=3.0)
    path, case = tmp_path / "checkpoint", replace(fresh, flags=flags)
    layouts = [{**SP, **DIST_OPT}, {**PP, **DIST_OPT}]
    other = Case(model=str(other_base), flags=flags)
    for found in run_megatron_ranks(_resume, 2, case, other, str(path), layouts):
        same, another = found["resumed"]
        assert _equal(same["loaded"], found["saved"]) and _equal(another["loaded"], found["saved"])
        assert not _equal(found["expected"], found["saved"])
        assert _equal(same["stepped"], found["expected"])
        for name, value in found["expected"].items():
            tolerance = 5e-4 if bf16 else 2e-6  # of steps of 1e-3
            torch.testing.assert_close(another["stepped"][name], value, rtol=0, atol=tolerance)
        assert "holds adapters of another base" in found["refused"]
        assert fresh.model in found["refused"]
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    assert names and all(".lora." in name for name in names if "_extra_state" not in name)


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[n]) for n, t in one.items())


def _train_critic(rank: int, case: Case, path: str) -> dict[str, Any]:
    """Train, save, load into a second critic; return which parameters moved and whether they agree."""
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    args = megatron_args(case, 2, SP)

    def start(checkpoint: str | None = None) -> Any:
        critic = MegatronTrainRayActor(args, rank, 2)
        critic.init(args, "critic", checkpoint=checkpoint)
        return critic

    critic = start()
    before = _state(critic)
    batch = my_rows(critic, 0)
    batch.values = [np.zeros(n, np.float32) for n in batch.response_lens]
    batch.returns = [np.ones(n, np.float32) for n in batch.response_lens]
    columns = CriticColumns(values=batch.values, returns=batch.returns)
    for rollout_id in range(2):  # the head starts at zero: adapters move from the second step on
        critic.train(rollout_id, my_rows(critic, 0), columns)
    after = _state(critic)
    if rank == 0:
        Path(path).mkdir()
    torch.distributed.barrier()
    critic.save_to(path, 0)
    return {
        "changed": {n for n, t in before.items() if not torch.equal(t, after[n])},
        "names": set(after),
        "resumed": _equal(_state(start(path)), after),
    }


def test_a_critic_trains_adapters_and_its_head(fresh, tmp_path):
    flags = {"lora_rank": 4, "lora_merge_for_rollout": True, "advantage_estimator": "ppo"}
    case = Case(model=fresh.model, flags={**flags, "micro_batch_size": 3})
    for found in run_megatron_ranks(_train_critic, 2, case, str(tmp_path / "critic")):
        adapters = {name for name in found["names"] if ".lora." in name}
        assert found["changed"] == adapters | {"output_layer.weight"}
        assert found["resumed"]


# ---- what is refused


def _skip_a_layer(rank: int, case: Case) -> str:
    """A model that reads the weight of a layer instead of calling it."""
    actor = start_actor(megatron_args(case, 1), rank, 1)
    attention = actor.chunks[0].decoder.layers[0].self_attention
    linear = attention.linear_proj
    attention.register_module("linear_proj", _Reading(linear))
    attention.linear_proj.unused = linear
    return _error(lambda: actor.log_probs(my_rows(actor, 0), "actor"))


class _Reading(torch.nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.read = [linear.weight]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.read[0].t(), None


def test_an_adapter_that_is_never_called_is_an_error(fresh):
    found = run_megatron_ranks(_skip_a_layer, 1, fresh)[0]
    assert "does not call" in found and "linear_proj" in found
