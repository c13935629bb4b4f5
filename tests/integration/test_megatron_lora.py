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
from tests.delta_nets import FAMILIES, publish
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
    first_gradient,
    megatron_args,
    my_rows,
    start_actor,
    whole_adapters,
    whole_weights,
)
from tests.parity.tiny_families import make_family
from tests.peft_runs import BUDGET, KL, hf_names, peft_case, peft_model, peft_outcome
from tests.rank_pool import run_fsdp_ranks, run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

GROUPED = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]
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
    "delta nets": ("qwen3_5", {"r": 3, "target_modules": "all-linear"}, {**KL, **BUDGET}),
    "delta nets, grouped": (
        "qwen3_next",
        {"r": 2, "target_modules": GROUPED},
        BUDGET,
    ),
    "delta nets, experts": (
        "qwen3_5_moe",
        {
            "r": 2,
            "target_modules": ["in_proj_qkv", "in_proj_b", "q_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        BUDGET,
    ),
    "supervised": (
        "qwen3",
        {"r": 4, "target_modules": "all-linear"},
        {"loss_type": "sft_loss", **BUDGET},
    ),
    "experts": (
        "qwen3_moe",
        {
            "r": 3,
            "lora_alpha": 9,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        {**KL, **BUDGET},
    ),
    "experts, down": (
        "qwen3_moe",
        {"r": 8, "target_modules": [], "target_parameters": ["experts.down_proj"]},
        {"micro_batch_size": 3},
    ),
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
    "TP2 SP, supervised": (2, "supervised", SP),
    "one rank, experts": (1, "experts", {}),
    "one rank, experts, recomputed": (1, "experts", FULL_RECOMPUTE),
    "one rank, experts, down": (1, "experts, down", {}),
    "EP2, experts": (2, "experts", EP),
    "EP2, experts, distributed optimizer": (2, "experts", {**EP, **OVERLAP}),
    "TP2 SP, experts": (2, "experts", SP),
    "TP2 SP, experts, down, recomputed": (2, "experts, down", {**SP, **FULL_RECOMPUTE}),
    "TP2 SP EP2, experts": (2, "experts", {**SP, **EP, **ETP1}),
    "PP2, experts": (2, "experts", PP),
    "VPP, experts, down": (2, "experts, down", VPP),
    "CP2, experts": (2, "experts", CP),
    "TP2 SP EP2 ETP2, experts": (4, "experts", {**SP, **EP}),
    "one rank, delta nets": (1, "delta nets", FULL_RECOMPUTE),
    "TP2, delta nets": (2, "delta nets", TP),
    "CP2, delta nets": (2, "delta nets", CP),
    "TP2 SP, delta nets, grouped": (2, "delta nets, grouped", SP),
    "PP2, delta nets, grouped": (2, "delta nets, grouped", PP),
    "EP2, delta nets, experts": (2, "delta nets, experts", {**EP, **OVERLAP}),
    "TP2 SP, delta nets, experts": (2, "delta nets, experts", SP),
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
    for ranks in (1, 2, 4):
        names = [name for name, layout in LAYOUTS.items() if layout[0] == ranks]
        of_ranks = run_megatron_ranks(_train_all, ranks, ranks, names, cases, str(folder))
        found |= {name: [outcomes[name] for outcomes in of_ranks] for name in names}
    return found


def _make_model(folder: Path, family: str) -> str:
    if family in ("glm4", "deepseek_v3"):
        return str(make_family(folder, family, vocab_size=320))
    layers: dict[str, Any] = {"num_hidden_layers": 4}
    if family in FAMILIES:
        layers["layer_types"] = ["linear_attention", "full_attention"] * 2
    return str(make_tiny_checkpoint(folder, family, weight_scale=3.0, **layers))


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
    grads = None if args.use_distributed_optimizer else first_gradient(actor, whole_adapters)
    for rollout_id in range(2):
        actor.train(rollout_id, my_rows(actor, rollout_id))
    after = _state(actor)
    actor.export_hf(folder)
    rows = my_rows(actor, 0)
    return {
        "grads": grads,
        "weights": whole_adapters(actor),
        "changed": {name for name, t in before.items() if not torch.equal(t, after[name])},
        "trained": {n for c in actor.chunks for n, p in c.named_parameters() if p.requires_grad},
        "num_states": sum(param.numel() for param, _ in actor.optimizer.moments()),
        "merged": whole_weights(actor),
        "rows": rows,
        "log_probs": actor.log_probs(rows, "actor"),
        "export": folder,
    }


def _state(actor: Any) -> dict[str, torch.Tensor]:
    """Parameters by name, of the first chunk of this rank, where names of chunks are the same."""
    return {n: p.detach().clone() for n, p in actor.chunks[0].named_parameters()}


def _rounding(layout: str) -> int:
    """With MLA even the naive loop differs by 4e-5 of the largest gradient between fp32 and fp64."""
    return 5 if LAYOUTS[layout][1] == "latent attention" else 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_peft(name, trained, naive):
    ours, theirs = trained[name][0]["grads"], naive[LAYOUTS[name][1]].grads
    if ours is None:
        return  # the distributed optimizer holds shards; adapters after training compare them
    assert ours.keys() == theirs.keys()
    for parameter, expected in theirs.items():
        scale = expected.abs().max()
        torch.testing.assert_close(
            ours[parameter] / scale, expected / scale, rtol=0, atol=5e-5 * _rounding(name)
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_after_training_are_those_of_peft(name, trained, naive):
    theirs = naive[LAYOUTS[name][1]].weights
    for rank in trained[name]:
        assert rank["weights"].keys() == theirs.keys()
        for parameter, expected in theirs.items():
            ours, atol = rank["weights"][parameter], 1e-5 * _rounding(name)
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=atol)


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


@pytest.fixture(scope="module")
def new(fresh: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Cases with new adapters: of linear layers, of experts, which have no dropout, and of delta nets.

    The tensors of the published Qwen3.5 have other names than the modules of the text model alone.
    """
    folder = tmp_path_factory.mktemp("m")
    model = make_tiny_checkpoint(folder / "qwen3_moe", "qwen3_moe", weight_scale=3.0)
    flags = {**fresh.flags, "lora_target_modules": ["all-linear", "experts"], "lora_dropout": 0.0}
    shared = {**flags, "lora_experts_shared_outer": True}
    hybrids = {
        family: str(make_tiny_checkpoint(folder / family, family, weight_scale=3.0))
        for family in FAMILIES
    }
    published = publish(hybrids, folder / "published")
    dense = {**fresh.flags, "lora_dropout": 0.0}
    return {
        "delta nets": Case(model=published["qwen3_5"], flags=dense),
        "delta nets, grouped": Case(
            model=published["qwen3_next"], flags={**dense, "lora_target_modules": GROUPED}
        ),
        "dense": fresh,
        "experts": Case(model=str(model), flags=flags),
        "shared": Case(model=str(model), flags=shared),
    }


def _start_fresh(rank: int, world_size: int, case: Case, layout: dict[str, Any]) -> dict[str, Any]:
    args = megatron_args(case, world_size, layout)
    actor = start_actor(args, rank, world_size)
    rows = my_rows(actor, 0)
    adapters, same = whole_adapters(actor), [actor.log_probs(rows, m) for m in ("actor", "ref")]
    sent = whole_weights(actor)
    actor.train(0, my_rows(actor, 0))
    after = [actor.log_probs(rows, m) for m in ("actor", "ref")]
    plain = Case(model=case.model, flags={**BUDGET, "bf16": args.precision == "bf16"})
    base = start_actor(megatron_args(plain, world_size, layout), rank, world_size)
    near = base.log_probs(rows, "actor")
    base_weights = whole_weights(base)
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


@pytest.mark.parametrize(
    "case, ranks, layout",
    [
        ("dense", 1, FULL_RECOMPUTE),
        ("dense", 2, SP),
        ("dense", 2, TP),
        ("experts", 2, EP),
        ("shared", 2, SP),
        ("delta nets", 2, SP),
    ],
)
def test_a_new_adapter_changes_no_bit_of_the_base(new, case, ranks, layout):
    layout = {**layout, **DIST_OPT}
    for found in run_megatron_ranks(_start_fresh, ranks, ranks, new[case], layout):
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
    return dict(actor.whole_adapters(torch.float32))


def _megatron_adapters(rank: int, case: Case, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    return whole_adapters(start_actor(megatron_args(case, 2, layout), rank, 2))


@pytest.mark.parametrize(
    "case, layout",
    [
        ("dense", SP),
        ("experts", EP),
        ("experts", SP),
        ("shared", EP),
        ("delta nets", TP),
        ("delta nets, grouped", SP),
    ],
)
def test_a_new_adapter_is_that_of_the_fsdp_trainer(new, case, layout):
    theirs = run_fsdp_ranks(_fsdp_adapters, 1, new[case])[0]
    for ours in run_megatron_ranks(_megatron_adapters, 2, new[case], layout):
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
    saved = whole_adapters(first)
    if rank == 0:
        Path(path).mkdir()
    torch.distributed.barrier()
    first.save_to(path, 0)
    first.train(1, my_rows(first, 1))
    expected, resumed = whole_adapters(first), []
    for layout in layouts:
        actor = start_actor(megatron_args(case, 2, layout), rank, 2, checkpoint=path)
        loaded = whole_adapters(actor)
        actor.train(1, my_rows(actor, 1))
        resumed.append({"loaded": loaded, "stepped": whole_adapters(actor)})
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


OTHER_BASES = {"dense": "qwen3", "delta nets": "qwen3_5", "delta nets, grouped": "qwen3_next"}


@pytest.mark.parametrize(
    "case, layouts, bf16",
    [
        ("dense", [SP, PP], False),
        ("dense", [SP, PP], True),
        ("experts", [{}, EP], False),
        ("experts", [EP, SP], False),
        ("shared", [EP, SP], False),
        ("delta nets", [TP, PP], False),
        ("delta nets, grouped", [CP, SP], False),
    ],
)
def test_a_checkpoint_holds_adapters_alone_and_resumes_in_another_layout(
    new, tmp_path, case, layouts, bf16
):
    """Bit for bit in its own layout; dropout is off, since its masks depend on the layout."""
    fresh = new[case]
    flags = {**fresh.flags, "lora_dropout": 0.0, "bf16": bf16}
    family = OTHER_BASES.get(case, "qwen3_moe")
    other_base = make_tiny_checkpoint(tmp_path / "other", family, seed=5, weight_scale=3.0)
    path, case = tmp_path / "checkpoint", replace(fresh, flags=flags)
    layouts = [{**layout, **DIST_OPT} for layout in layouts]
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


def _merged_dtypes(rank: int, case: Case) -> dict[str, set[str]]:
    from slime.backends.megatron_utils.hf_weights.export import export_hf

    actor = start_actor(megatron_args(case, 1), rank, 1)
    merged = export_hf(actor.chunks, actor._weights, torch.bfloat16, merge=actor.adapters.merge())
    found: dict[str, set[str]] = {}
    for name, tensor in merged:
        found.setdefault(str(tensor.dtype), set()).add(name)
    return found


def test_parts_of_a_fused_weight_without_adapter_are_cast_too(fresh):
    """Query, key and value are one weight in Megatron; only the query has an adapter."""
    flags = {"lora_rank": 4, "lora_target_modules": ["q_proj"], "lora_merge_for_rollout": True}
    case = Case(model=fresh.model, flags={**flags, **BUDGET})
    found = run_megatron_ranks(_merged_dtypes, 1, case)[0]
    assert found.keys() == {"torch.bfloat16"}
    assert any(name.endswith("k_proj.weight") for name in found["torch.bfloat16"])


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
