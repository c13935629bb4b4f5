"""Damage that leaves a file its size: noticed before anything is loaded, with either trainer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from slime.core.errors import ConfigError
from slime.rollout.train_data import split_batch
from slime.runlog.checkpoint_files import file_checksum
from slime.runlog.checkpoint_folder import CheckpointFolder, CheckpointMeta, read_meta
from tests import fsdp, megatron
from tests.rank_pool import run_fsdp_ranks, run_megatron_ranks
from tests.tiny import make_tiny_checkpoint


def zeros(file: Path) -> None:
    """As after a crash of a file system that had not written the blocks yet."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle - 2048 : middle + 2048] = bytes(4096)
    file.write_bytes(data)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


def _answers(rank: int, backend: str, model: str, folder: str) -> dict[str, Any]:
    """Two checkpoints of two ranks, the second written in the background; and copies with damage."""
    case, root = fsdp.Case(model=model), Path(folder)

    def start(checkpoint: str | None = None) -> Any:
        if backend == "fsdp":
            from slime.backends.fsdp_utils.actor import FSDPTrainRayActor as Actor

            args = case.args(async_save=True)
        else:
            from slime.backends.megatron_utils.actor import MegatronTrainRayActor as Actor

            layout = {"tensor_model_parallel_size": 2}
            args = megatron.megatron_args(case, 2, layout, async_save=True)
        actor = Actor(args, rank, 2)
        actor.init(args, checkpoint=checkpoint)
        return actor

    actor, checkpoints = start(), CheckpointFolder(root / "saved")
    dp = 2 if backend == "fsdp" else 1
    rows = split_batch(actor.args, fsdp.make_rows(), dp_size=dp, cp_size=1)
    actor.train(0, rows[rank % dp])
    recorded = []
    for rollout_id in (0, 1):
        aside = checkpoints.temporary(rollout_id)
        if rank == 0:
            checkpoints.begin(rollout_id)
        dist.barrier()
        actor.save_to(str(aside), rollout_id, force_sync=rollout_id == 0)
        actor.wait_save()
        dist.barrier()
        if rank == 0:
            recorded.append(_recorded(aside))
            checkpoints.commit(
                CheckpointMeta(rollout_id=rollout_id, weight_version=1, train_backend=backend)
            )
        dist.barrier()
    answers: dict[str, Any] = {"recorded": recorded}
    answers["intact"] = [_answer(start, checkpoints.path(number)) for number in (0, 1)]
    names = [n for n in read_meta(checkpoints.path(1)).sizes if n.endswith((".distcp", "_0.pt"))]
    for damage in (zeros, flip):
        for name in names:
            copy = CheckpointFolder(root / f"{damage.__name__} {Path(name).name}")
            if rank == 0:
                shutil.copytree(root / "saved", copy.root)
                damage(copy.path(1) / name)
            dist.barrier()
            answers[f"{damage.__name__} {name}"] = _answer(start, copy.path(1))
    if rank == 0:
        _forget_checksums(copy.path(0))
    dist.barrier()
    answers["without checksums"] = _answer(start, copy.path(0))
    return answers


def _recorded(folder: Path) -> dict[str, bool]:
    """Of each file that the ranks have summed, by name, whether rightly."""
    return {
        str(part.parent.relative_to(folder) / name): file_checksum(part.parent / name) == value
        for part in folder.rglob(".checksums_*.json")
        for name, value in json.loads(part.read_text()).items()
    }


def _forget_checksums(path: Path) -> None:
    fields = json.loads((path / "meta.json").read_text())
    for key in ("checksums", "checksum"):
        del fields[key]
    (path / "meta.json").write_text(json.dumps(fields))


def _answer(start: Any, path: Path) -> str:
    try:
        start(str(path))
    except ConfigError as error:
        return str(error)
    return "loaded"


def _assert_noticed(ranks: list[dict[str, Any]], folder: Path) -> None:
    first = ranks[0]
    assert first["intact"] == ["loaded", "loaded"]
    assert first["without checksums"] == "loaded"
    for summed in first["recorded"]:  # in the foreground and in the background
        assert summed and all(summed.values())
        assert all(name.endswith(".distcp") for name in summed)
    damaged = [key for key in first if key.startswith(("zeros", "flip"))]
    assert len([key for key in damaged if key.endswith(".distcp")]) >= 4  # of two ranks, twice
    for key in damaged:
        damage, name = key.split(" ", 1)
        path = folder / f"{damage} {Path(name).name}" / "iter_0000001"
        for rank in ranks:  # all say the same
            assert f"{path} is damaged: {name} is not what was written" in rank[key], key
            assert rank[key].endswith("use another one: --ckpt-step 0")


def test_fsdp(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model", num_attention_heads=6)
    ranks = run_fsdp_ranks(_answers, 2, "fsdp", str(model), str(tmp_path))
    _assert_noticed(ranks, tmp_path)


def test_megatron(tmp_path):
    pytest.importorskip("megatron.core")
    model = make_tiny_checkpoint(tmp_path / "model")
    ranks = run_megatron_ranks(_answers, 2, "megatron", str(model), str(tmp_path))
    _assert_noticed(ranks, tmp_path)
