"""A trainer that sleeps between rollouts learns the same, bit for bit, and holds no gradients meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.config.arguments import Args
from tests import fsdp, megatron
from tests.fsdp import Case, make_rows
from tests.megatron import DIST_OPT, EP, ETP1, OVERLAP, PP, SP, megatron_args, my_rows
from tests.rank_pool import run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

TURNS = {"colocate": True, "rollout_num_gpus": None}  # trainer and engines share their devices
ADAPTERS = {"lora_rank": 4, "lora_merge_for_rollout": True}
EXPERTS = {"lora_target_modules": ["q_proj", "experts"]}
# bf16 and an optimizer in host memory: tests/gpu/test_sleeping_cuda.py.
LAYOUTS: dict[int, dict[str, tuple[str, tuple[dict[str, Any], ...]]]] = {
    1: {
        "alone": ("dense", ()),
        "alone, distributed optimizer": ("moe", (DIST_OPT,)),
        "alone, adapters": ("dense", (ADAPTERS,)),
    },
    2: {
        "DP2": ("dense", ()),
        "DP2, overlapped": ("dense", (OVERLAP,)),
        "EP2": ("moe", (EP, ETP1, DIST_OPT)),
        "TP2": ("dense", (SP,)),
        "PP2": ("dense", (PP,)),
        "EP2, adapters of experts": ("moe", (EP, ETP1, DIST_OPT, ADAPTERS, EXPERTS)),
        "TP2, adapters": ("dense", (SP, ADAPTERS)),
    },
}
REF = {"use_kl_loss": True, "kl_loss_coef": 0.1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    families = {"dense": "qwen3", "moe": "qwen3_moe"}
    return {
        name: str(make_tiny_checkpoint(folder / name, family, weight_scale=3.0))
        for name, family in families.items()
    }


def _gradient_bytes(actor: Any) -> int:
    buffers = [b for chunk in actor.model for b in chunk.buffers + chunk.expert_parallel_buffers]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def _own_weights(actor: Any) -> dict[str, torch.Tensor]:
    """This rank's part."""
    return {
        f"{number} {name}": param.detach().clone()
        for number, chunk in enumerate(actor.chunks)
        for name, param in chunk.named_parameters()
    }


def _train_in_turns(actor: Any) -> list[int]:
    """As a colocated run does; bytes of gradients when they are not needed, before and asleep."""
    held = [_gradient_bytes(actor)]
    for rollout_id in range(2):
        actor.wake_up()
        actor.train(rollout_id, my_rows(actor, rollout_id))
        held.append(_gradient_bytes(actor))  # engines get the weights
        megatron.whole_weights(actor)
        actor.sleep()
        held.append(_gradient_bytes(actor))
    actor.wake_up()
    return held


def _both_ways(rank: int, world_size: int, many: dict[str, tuple[Args, Args]]) -> dict[str, Any]:
    found = {}
    for name, (apart, colocated) in many.items():
        expected = megatron.start_actor(apart, rank, world_size)
        held = _gradient_bytes(expected)
        for rollout_id in range(2):
            expected.train(rollout_id, my_rows(expected, rollout_id))
        actor = megatron.start_actor(colocated, rank, world_size)
        in_turns = _train_in_turns(actor)
        weights = _own_weights(expected), _own_weights(actor)
        found[name] = {"apart": held, "in turns": in_turns, "weights": weights}
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_megatron_learns_the_same_and_holds_no_gradients_meanwhile(models, world_size):
    many = {}
    for name, (model, layouts) in LAYOUTS[world_size].items():
        case = Case(model=models[model], steps=2, flags={"micro_batch_size": 3, **REF})
        many[name] = tuple(
            megatron_args(case, world_size, *layouts, **turns) for turns in ({}, TURNS)
        )
    for outcome in run_megatron_ranks(_both_ways, world_size, world_size, many):
        for name, found in outcome.items():
            assert found["apart"] > 0, name  # else there is nothing to drop
            assert found["in turns"] == [0] * 5, name
            expected, weights = found["weights"]
            _assert_same(name, weights, expected)


def _train_with_critic(rank: int, args: Args, world_size: int) -> dict[str, Any]:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    actor, critic = (MegatronTrainRayActor(args, rank, world_size) for _ in range(2))
    actor.init(args, "actor", with_ref=True)
    critic.init(args, "critic")
    held = []

    def take_turns(goes: Any, comes: Any) -> None:
        if args.offload_train:
            goes.sleep()
            comes.wake_up()
            held.append(_gradient_bytes(goes))

    for rollout_id in range(2):
        take_turns(actor, critic)
        values = critic.values(my_rows(actor, rollout_id))
        take_turns(critic, actor)
        actor.train(rollout_id, my_rows(actor, rollout_id), values)
        targets = actor.critic_targets()
        take_turns(actor, critic)
        critic.train(rollout_id, my_rows(actor, rollout_id), targets)
        take_turns(critic, actor)
    critic.wake_up()
    return {"held": held, "actor": _own_weights(actor), "critic": _own_weights(critic)}


def test_an_actor_and_its_critic_that_take_turns_learn_the_same(models):
    flags = {"advantage_estimator": "ppo", "micro_batch_size": 3, "kl_coef": 0.3}
    case = Case(model=models["dense"], flags=flags)
    apart, turns = (
        run_megatron_ranks(_train_with_critic, 2, megatron_args(case, 2, DIST_OPT, **more), 2)
        for more in ({}, TURNS)
    )
    for rank in range(2):
        assert turns[rank]["held"] == [0] * 8
        for role in ("actor", "critic"):
            _assert_same(role, turns[rank][role], apart[rank][role])


def _fsdp_both_ways(rank: int, world_size: int, many: dict[str, tuple[Args, Args]]) -> Any:
    return {
        name: [_train_fsdp(args, rank, world_size) for args in pair] for name, pair in many.items()
    }


def _train_fsdp(args: Args, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    actor = fsdp.start_actor(args, rank, world_size)
    for rollout_id in range(2):
        mine = fsdp.split_batch(args, make_rows(rollout_id), dp_size=world_size, cp_size=1)[rank]
        if args.offload_train:
            actor.wake_up()
        actor.train(rollout_id, mine)
        if args.offload_train:
            actor.sleep()
            assert all(param.grad is None for param in actor.model.params.values())
    actor.wake_up()
    return fsdp.whole_weights(actor)


@pytest.mark.parametrize("world_size", [1, 2])
def test_fsdp_learns_the_same_and_holds_no_gradients_meanwhile(models, world_size):
    many = {}
    for name, more in {"plain": {}, "on the host": {"fsdp_cpu_offload": True}}.items():
        case = Case(model=models["dense"], steps=2, flags={"micro_batch_size": 3, **REF, **more})
        ranks = {"actor_num_gpus_per_node": world_size, "rollout_num_gpus": 1}
        many[name] = tuple(case.args(**{**ranks, **turns}) for turns in ({}, TURNS))
    for outcome in run_megatron_ranks(_fsdp_both_ways, world_size, world_size, many):
        for name, (expected, weights) in outcome.items():
            _assert_same(name, weights, expected)


def _assert_same(
    what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{what}: {name}"
