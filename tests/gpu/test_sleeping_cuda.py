"""Asleep, a trainer on a GPU leaves weights and optimizer in host memory, and nothing of its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.arguments import Args
from slime.rollout.train_data import split_batch
from tests import fsdp
from tests.fsdp import Case, make_rows
from tests.tiny import make_tiny_checkpoint

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

from tests import megatron  # noqa: E402
from tests.megatron import DIST_OPT, megatron_args, my_rows  # noqa: E402

IN_FP32 = {"accumulate_allreduce_grads_in_fp32": True}
ON_HOST = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
MEGATRON: dict[str, tuple[dict[str, Any], int]] = {  # bytes on the GPU per parameter, asleep
    "fp32": ({"fp32": True}, 4 + 8),
    "bf16": ({"bf16": True, **IN_FP32}, 2 + 12),
    "bf16, distributed optimizer": ({"bf16": True, **DIST_OPT, **IN_FP32}, 2 + 12),
    "bf16, optimizer on the host": ({"bf16": True, **DIST_OPT, **ON_HOST}, 2),
}
FSDP: dict[str, tuple[dict[str, Any], int]] = {
    "fp32": ({"fp32": True}, 12),
    "bf16": ({"bf16": True}, 12),
    "on the host": ({"bf16": True, "fsdp_cpu_offload": True}, 0),
}
REF = {"use_kl_loss": True, "kl_loss_coef": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("m")
    sizes = {"hidden_size": 512, "head_dim": 64, "tie_word_embeddings": False}
    return str(make_tiny_checkpoint(folder / "m", weight_scale=3.0, **sizes))


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(model: str, name: str, deterministic: None):
    flags, per_parameter = MEGATRON[name]
    case = Case(model=model, steps=2, flags={"micro_batch_size": 3, **REF})
    apart, turns = (
        megatron_args(case, 1, flags, **more)
        for more in ({}, {"colocate": True, "offload_train": True, "rollout_num_gpus": None})
    )
    expected = _train(megatron.start_actor(apart, 0, 1), _rows)
    actor = megatron.start_actor(turns, 0, 1)
    found = _train(actor, _rows)
    count = sum(p.numel() for chunk in actor.chunks for p in chunk.parameters())
    _compare(found, expected, count * per_parameter, count)


@pytest.mark.parametrize("name", FSDP)
def test_fsdp(model: str, name: str, deterministic: None):
    flags, per_parameter = FSDP[name]
    case = Case(model=model, steps=2, flags={"micro_batch_size": 3, **flags})
    apart, turns = (case.args(), case.args(colocate=True, rollout_num_gpus=None))
    expected = _train(fsdp.start_actor(apart, 0, 1), _fsdp_rows)
    actor = fsdp.start_actor(turns, 0, 1)
    found = _train(actor, _fsdp_rows)
    count = sum(p.numel() for p in actor.model.params.values())
    _compare(found, expected, count * per_parameter, count)


@pytest.fixture
def deterministic():
    """Sums whose order the GPU chooses would hide what is looked for."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _rows(actor: Any, rollout_id: int) -> Any:
    return my_rows(actor, rollout_id)


def _fsdp_rows(actor: Any, rollout_id: int) -> Any:
    return split_batch(actor.args, make_rows(rollout_id), dp_size=1, cp_size=1)[0]


def _train(actor: Any, rows: Any) -> dict[str, Any]:
    """Two rollouts; where engines take turns, asleep after each, and what that took and gave."""
    args: Args = actor.args
    asleep = pinned = gpu = 0
    for rollout_id in range(2):
        actor.train(rollout_id, rows(actor, rollout_id))
        if args.offload_train:
            before, awake = _pinned(), torch.cuda.memory_allocated()
            actor.sleep()
            pinned, gpu = _pinned() - before, awake - torch.cuda.memory_allocated()
            asleep = actor._offloaded.nbytes
            actor.wake_up()
    weights = {name: t.cpu() for bucket in actor.hf_buckets() for name, t in bucket}
    return {"weights": weights, "asleep": asleep, "pinned": pinned, "gpu": gpu}


def _pinned() -> int:
    """Blocks that are in use; those that were given back wait to be used again."""
    return torch.cuda.host_memory_stats()["active_bytes.current"]


def _compare(found: dict[str, Any], expected: dict[str, Any], held: int, count: int) -> None:
    """Blocks of pinned memory are rounded up to powers of two; gradients would be 4 bytes per parameter."""
    assert held <= found["gpu"] < held + count, found["gpu"]
    assert held <= found["asleep"] < held + count, found["asleep"]
    assert found["pinned"] < 2 * held + count, found["pinned"]
    for name, tensor in expected["weights"].items():
        assert torch.equal(found["weights"][name], tensor), name
