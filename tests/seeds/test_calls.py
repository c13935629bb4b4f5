"""The methods of the documents called as written there: update_weights(), save_model(id), save(id)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.core.types import EngineInfo
from slime.runlog.checkpoint_folder import find_checkpoint, read_meta
from slime.utils.sync_http import get_json, post_json
from tests.args import make_args
from tests.engines import TOKEN, engine_server
from tests.rank_pool import run_megatron_ranks
from tests.seeds.documents import quote
from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A Qwen2 model, as the document's snippet has it, and an engine that serves it."""
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("qwen2") / "m", "qwen2")
    with engine_server(model, "--dtype", "float32", "--max-total-tokens", "2048") as server:
        yield model, EngineInfo(url=server.url)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_actor_as_documented(served, backend, tmp_path):
    model, engine = served
    versions, start = run_megatron_ranks(_use_actor, 1, backend, model, engine, tmp_path)[0]
    assert versions == ["1", "2"]
    assert start == 4  # the rollout after the one that was saved
    saved = find_checkpoint(str(tmp_path))
    assert saved is not None and read_meta(saved).rollout_id == 3
    assert read_meta(saved).weight_version == 2
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


@pytest.mark.parametrize("place", ["backends:203", "backends:223"])
def test_updater_right_after_construction(served, place):
    """The snippet itself: the engine then holds what the script's model holds."""
    model, engine = served
    before, after = run_megatron_ranks(_run_snippet, 1, place, model, engine)[0]
    assert before != after


def _args(model: Path, engine: EngineInfo, **flags: Any) -> Any:
    os.environ["SLIME_ENGINE_TOKEN"] = TOKEN
    return make_args(
        hf_checkpoint=str(model),
        actor_num_gpus_per_node=1,
        rollout_external=True,
        rollout_external_engine_addrs=[engine.url],
        **flags,
    )


def _start(backend: str, args: Any, **options: Any) -> Any:
    if backend == "megatron":
        from slime.backends.megatron_utils.actor import MegatronTrainRayActor as Actor
    else:
        from slime.backends.fsdp_utils.actor import FSDPTrainRayActor as Actor
    actor = Actor(args)
    return actor, actor.init(args, "actor", with_ref=False, with_opd_teacher=False, **options)


def _use_actor(rank: int, backend: str, model: Path, engine: EngineInfo, save: Path) -> Any:
    args = _args(model, engine, train_backend=backend, save=str(save))
    actor, _ = _start(backend, args)
    versions = []
    for _ in range(2):
        actor.update_weights()
        versions.append(get_json(f"{engine.url}/model_info")["weight_version"])
    if backend == "megatron":
        actor.save_model(3)
    else:
        actor.save(3, force_sync=True)
    _, start = _start(backend, args, checkpoint=str(find_checkpoint(str(save))))
    return versions, start


def _run_snippet(rank: int, place: str, model: Path, engine: EngineInfo) -> Any:
    args = _args(model, engine, train_backend="megatron")
    actor, _ = _start("megatron", args)
    actor.update_weights()
    before = _log_probs(engine)
    with torch.no_grad():
        for param in actor.chunks[0].parameters():
            param.mul_(1.05)
    exec(quote(place).text, {"args": args, "model": actor.chunks[0]})
    return before, _log_probs(engine)


def _log_probs(engine: EngineInfo) -> Any:
    body = {
        "text": "1+1=",
        "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        "return_logprob": True,
    }
    return post_json(f"{engine.url}/generate", body)["meta_info"]["output_token_logprobs"]
