"""Frozen weights stay as they are and all others move, with both trainers and both kinds of names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.rollout.train_data import split_batch
from tests import fsdp, megatron
from tests.fsdp import Case, make_rows
from tests.ranks import run_ranks
from tests.tiny import make_tiny_checkpoint

SETTINGS: dict[str, dict[str, Any]] = {
    "megatron names": {"freeze_params_name_list": ["embedding", "output_layer"]},
    "hf names": {"freeze_params_name_list": ["embed_tokens", "lm_head"]},
    "only": {"only_train_params_name_list": [r"layers\.1\.mlp\.linear_fc", "final_layernorm"]},
}
TRAINERS = ("fsdp", "megatron", "megatron in two stages")
ENDS = {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def moved(tied: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict]:
    """By trainer and setting: whether each weight, under its Hugging Face name, has changed."""
    folder = tmp_path_factory.mktemp("model")
    model = str(make_tiny_checkpoint(folder, weight_scale=3.0, tie_word_embeddings=tied))
    one = run_ranks(_train_all, 1, model)[0]
    return one | run_ranks(_train_in_stages, 2, model)[0]


def _train_all(rank: int, model: str) -> dict[tuple[str, str], dict[str, bool]]:
    found = {}
    for name, flags in SETTINGS.items():
        case = Case(model=model, flags=flags)
        args = case.args()
        actor = fsdp.start_actor(args, rank, 1)
        part = split_batch(args, make_rows(), dp_size=1, cp_size=1)[rank]
        found["fsdp", name] = _moved(actor, part, fsdp.whole_weights)
        actor = megatron.start_actor(megatron.megatron_args(case, 1), rank, 1)
        part = megatron.my_rows(actor, 0)
        found["megatron", name] = _moved(actor, part, megatron.whole_weights)
    return found


def _train_in_stages(rank: int, model: str) -> dict[tuple[str, str], dict[str, bool]]:
    found = {}
    for name, flags in SETTINGS.items():
        args = megatron.megatron_args(Case(model=model, flags=flags), 2, megatron.PP)
        actor = megatron.start_actor(args, rank, 2)
        moved = _moved(actor, megatron.my_rows(actor, 0), megatron.whole_weights)
        found["megatron in two stages", name] = moved
    return found


def _moved(actor: Any, batch: Any, weights_of: Any) -> dict[str, bool]:
    before = weights_of(actor)
    actor.train(0, batch)
    after = weights_of(actor)
    return {name: not torch.equal(after[name], weight) for name, weight in before.items()}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("names", ["megatron names", "hf names"])
def test_embedding_and_output_layer_stay(moved, tied, trainer, names):
    found = moved[trainer, names]
    assert {name for name, changed in found.items() if not changed} == ENDS & set(found)
    assert ("lm_head.weight" in found) is not tied


@pytest.mark.parametrize("trainer", TRAINERS)
def test_only_what_is_named_is_trained(moved, trainer):
    expected = {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    changed = {name for name, moves in moved[trainer, "only"].items() if moves}
    assert changed == {*expected, "model.norm.weight"}
