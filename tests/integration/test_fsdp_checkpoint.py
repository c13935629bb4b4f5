"""A run resumed from a checkpoint is the unbroken run, bit by bit; other numbers of ranks load it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.fsdp_utils.actor import FSDPTrainRayActor
from slime.core.errors import UserError
from slime.rollout.train_data import split_batch
from slime.runlog.checkpoint_folder import find_checkpoint, read_meta
from tests.fsdp import Case, make_rows, start_actor, whole_weights
from tests.rank_pool import run_fsdp_ranks
from tests.tiny import make_tiny_checkpoint

TIMES = "perf/"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("model") / "m", num_attention_heads=6)
    flags = {"micro_batch_size": 4, "lr_decay_style": "linear", "lr_warmup_iters": 2}
    return Case(model=str(model), flags=flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two_ranks(case: Case, folder: Path) -> dict[str, Any]:
    return run_fsdp_ranks(_unbroken_and_resumed, 2, case, str(folder))[0]


@pytest.fixture(scope="module")
def one_rank(case: Case, folder: Path, two_ranks: dict[str, Any]) -> dict[str, Any]:
    return run_fsdp_ranks(_loaded_alone, 1, case, str(folder))[0]


def test_a_reference_that_moves_is_part_of_the_checkpoint(two_ranks):
    resumed, unbroken = two_ranks["moving_resumed"], two_ranks["moving"]
    assert resumed == unbroken
    # Against the first weights the KL would go on growing; against the last rollout's it does not.
    assert unbroken[1]["train/kl_loss"] < two_ranks["standing"][1]["train/kl_loss"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_resumed_run_is_bitwise_the_unbroken_one(kind, two_ranks):
    resumed, unbroken = two_ranks[kind], two_ranks["unbroken"]
    assert resumed["start"] == 2
    assert resumed["metrics"] == unbroken["metrics"]
    for name, weight in unbroken["weights"].items():
        assert torch.equal(resumed["weights"][name], weight), name
    assert torch.equal(resumed["random"], unbroken["random"])


def test_another_number_of_ranks_loads_the_same_weights_and_continues(two_ranks, one_rank):
    for name, weight in two_ranks["saved_weights"].items():
        assert torch.equal(one_rank["loaded"][name], weight), name
    for name, weight in two_ranks["unbroken"]["weights"].items():
        torch.testing.assert_close(one_rank["weights"][name], weight, rtol=1e-4, atol=1e-6)


def test_without_saved_moments_adam_starts_anew_but_the_schedule_goes_on(two_ranks, one_rank):
    unbroken = two_ranks["unbroken"]["metrics"][0]
    assert one_rank["no_optim"]["train/lr"] == unbroken["train/lr"]
    assert one_rank["no_optim"]["train/grad_norm"] == pytest.approx(
        unbroken["train/grad_norm"], rel=1e-4
    )
    assert one_rank["optimizer_files"] == {"with": True, "without": False}


def test_saved_moments_need_not_be_loaded(one_rank):
    """--no-load-optim on a checkpoint with moments is as good as one that was saved without."""
    assert one_rank["not_loaded"]["train/lr"] == one_rank["no_optim"]["train/lr"]
    for name, weight in one_rank["no_optim_weights"].items():
        assert torch.equal(one_rank["not_loaded_weights"][name], weight), name


def test_moments_that_started_anew_are_resumed_with_the_updates_they_have_seen(one_rank):
    """By the number of the run's steps Adam would take their first updates for small."""
    unbroken, resumed = one_rank["anew"]
    for name, weight in unbroken.items():
        assert torch.equal(resumed[name], weight), name


def test_reference_model_can_be_one_of_our_checkpoints(one_rank):
    assert one_rank["ref_kl"] == pytest.approx(0.0, abs=1e-7)


def test_checkpoint_of_another_architecture_is_refused_in_one_sentence(one_rank):
    assert "another architecture (qwen3)" in one_rank["other_architecture"]
    assert (
        "model.embed_tokens.weight is [320, 64] there and [320, 32] here"
        in one_rank["other_architecture"]
    )
    assert "not a checkpoint of the FSDP trainer" in one_rank["no_checkpoint"]


def test_a_checkpoint_whose_background_write_failed_is_never_committed(case, tmp_path):
    (found,) = run_fsdp_ranks(_failed_write, 1, case, str(tmp_path))
    assert found == {"after the failure": None, "after waiting again": None, "after the next": 1}


class _FullDisk(FSDPTrainRayActor):
    """Its background writes fail while `is_full`."""

    is_full = False

    def wait_write(self) -> None:
        super().wait_write()
        if self.is_full:
            raise OSError("No space left on device")


def _failed_write(rank: int, case: Case, folder: str) -> dict[str, int | None]:
    actor = _FullDisk(case.args(num_rollout=4, async_save=True, save=folder), rank, 1)
    actor.init()
    actor.save(0)
    actor.is_full = True
    with pytest.raises(OSError, match="No space left"):
        actor.wait_save()
    found = {"after the failure": _latest(folder)}
    actor.is_full = False
    actor.wait_save()
    found["after waiting again"] = _latest(folder)
    actor.save(1, force_sync=True)
    return {**found, "after the next": _latest(folder)}


def _latest(folder: str) -> int | None:
    path = find_checkpoint(folder)
    return None if path is None else read_meta(path).rollout_id


def _train(actor: Any, rollout_ids: range, world_size: int, rank: int) -> list[dict[str, float]]:
    metrics = []
    for rollout_id in rollout_ids:
        parts = split_batch(actor.args, make_rows(rollout_id), dp_size=world_size, cp_size=1)
        report = actor.train(rollout_id, parts[rank])
        metrics.append({k: v for k, v in report.metrics.items() if not k.startswith(TIMES)})
    return metrics


def _unbroken_and_resumed(rank: int, case: Case, folder: str) -> dict[str, Any]:
    args = case.args(num_rollout=4, async_save=True)
    actor = start_actor(args, rank, 2)
    _train(actor, range(2), 2, rank)
    saved_weights = whole_weights(actor)
    for kind in ("sync", "async", "no_optim"):
        Path(folder, kind).mkdir(exist_ok=True)
    actor.save_to(f"{folder}/sync", 1, force_sync=True)
    actor.save_to(f"{folder}/async", 1)  # still being written while the weights change
    metrics = _train(actor, range(2, 4), 2, rank)
    actor.wait_save()
    result = {
        "saved_weights": saved_weights,
        "unbroken": {
            "metrics": metrics,
            "weights": whole_weights(actor),
            "random": torch.rand(3),
        },
    }
    for kind in ("sync", "async"):
        resumed = start_actor(args, rank, 2, checkpoint=f"{folder}/{kind}")
        start = resumed.load(f"{folder}/{kind}") + 1
        result[kind] = {
            "start": start,
            "metrics": _train(resumed, range(2, 4), 2, rank),
            "weights": whole_weights(resumed),
            "random": torch.rand(3),
        }
    without = start_actor(
        case.args(num_rollout=4, no_save_optim=True), rank, 2, checkpoint=f"{folder}/sync"
    )
    without.save_to(f"{folder}/no_optim", 1)
    return {**result, **_moving_reference(rank, case, f"{folder}/moving")}


def _moving_reference(rank: int, case: Case, folder: str) -> dict[str, Any]:
    kl_flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}
    args = case.args(num_rollout=4, ref_update_interval=1, **kl_flags)
    Path(folder).mkdir(exist_ok=True)
    actor = start_actor(args, rank, 2)
    _train(actor, range(2), 2, rank)
    actor.save_to(folder, 1)
    standing = start_actor(case.args(num_rollout=4, **kl_flags), rank, 2)
    return {
        "moving": _train(actor, range(2, 4), 2, rank),
        "moving_resumed": _train(
            start_actor(args, rank, 2, checkpoint=folder), range(2, 4), 2, rank
        ),
        "standing": _train(standing, range(4), 2, rank)[2:],
    }


def _loaded_alone(rank: int, case: Case, folder: str) -> dict[str, Any]:
    args = case.args(num_rollout=4)
    actor = start_actor(args, rank, 1, checkpoint=f"{folder}/async")
    loaded = whole_weights(actor)
    _train(actor, range(2, 4), 1, rank)
    without = start_actor(args, rank, 1, checkpoint=f"{folder}/no_optim")
    fresh = start_actor(
        case.args(num_rollout=4, no_load_optim=True), rank, 1, checkpoint=f"{folder}/sync"
    )
    fresh_metrics = _train(fresh, range(2, 3), 1, rank)[0]
    fresh_weights = whole_weights(fresh)
    kl_flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
    same = start_actor(case.args(ref_load=f"{folder}/sync", **kl_flags), rank, 1)
    other = make_tiny_checkpoint(Path(folder, "other"), hidden_size=32)
    return {
        "loaded": loaded,
        "weights": whole_weights(actor),
        "no_optim": _train(without, range(2, 3), 1, rank)[0],
        "no_optim_weights": whole_weights(without),
        "not_loaded": fresh_metrics,
        "not_loaded_weights": fresh_weights,
        "anew": _saved_and_resumed(fresh, args, f"{folder}/anew"),
        "optimizer_files": {
            "with": _has_optimizer(Path(folder, "sync")),
            "without": _has_optimizer(Path(folder, "no_optim")),
        },
        "ref_kl": _train(same, range(1), 1, rank)[0]["train/kl_loss"],
        "other_architecture": _refusal(Case(model=str(other)), f"{folder}/sync"),
        "no_checkpoint": _refusal(Case(model=str(other)), folder, load=True),
    }


def _saved_and_resumed(actor: Any, args: Any, folder: str) -> list[dict[str, torch.Tensor]]:
    """Return the weights after one more rollout, of the actor itself and of one that was resumed."""
    Path(folder).mkdir()
    actor.save_to(folder, 2, force_sync=True)
    resumed = start_actor(args, 0, 1, checkpoint=folder)
    for one in (actor, resumed):
        _train(one, range(3, 4), 1, 0)
    return [whole_weights(actor), whole_weights(resumed)]


def _has_optimizer(path: Path) -> bool:
    from torch.distributed.checkpoint import FileSystemReader

    names = FileSystemReader(path / "fsdp").read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.") for name in names)


def _refusal(case: Case, path: str, load: bool = False) -> str:
    try:
        if load:
            start_actor(case.args(), 0, 1).load(path)
        else:
            start_actor(case.args(), 0, 1, checkpoint=path)
    except UserError as error:
        return str(error)
    return "not refused"
