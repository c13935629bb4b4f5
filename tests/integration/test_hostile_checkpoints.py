"""Checkpoints made to run code: --load, --ref-load and the critic refuse them, with either trainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.core.errors import UserError
from slime.rollout.train_data import split_batch
from tests import fsdp, hostile, megatron
from tests.forked import run_python
from tests.rank_pool import run_fsdp_ranks, run_megatron_ranks
from tests.tiny import make_tiny_checkpoint

TENSOR = {"fsdp": "model.model.norm.weight", "megatron": "decoder.final_layernorm.weight"}
# How a checkpoint is read: flags, and what the trainer is started with.
READS: dict[str, Callable[[Any, str], dict[str, Any]]] = {
    "load": lambda start, path: start(checkpoint=path),
    "ref_load": lambda start, path: start(ref_load=path, use_kl_loss=True, kl_loss_coef=0.1),
    "critic": lambda start, path: start(role="critic", critic_load=path),
}


def attacks(backend: str, index: Path) -> dict[str, Callable[[Path, Path], None]]:
    """By name: a change of the checkpoint in the first folder that would make the second."""
    found = {
        "index": lambda path, marker: hostile.hostile_index(path / index, marker),
        "object": lambda path, marker: hostile.hostile_object(
            path / index, TENSOR[backend], marker
        ),
        "rng_0.pt": lambda path, marker: hostile.hostile_torch_file(path / "rng_0.pt", marker),
    }
    if backend == "megatron":
        found["common.pt"] = lambda path, marker: hostile.hostile_torch_file(
            path / "common.pt", marker
        )
        found["zarr"] = lambda path, marker: (path / "metadata.json").write_text(
            '{"sharded_backend": "zarr", "common_backend": "torch"}'
        )
    return found


def _refusals(rank: int, backend: str, model: str, folder: str) -> dict[str, str]:
    """Save, then damage a copy per attack and say what each way of reading it answers."""
    case, root = fsdp.Case(model=model), Path(folder)

    def start(*, role: str = "actor", checkpoint: str | None = None, **flags: Any) -> Any:
        if backend == "fsdp":
            from slime.backends.fsdp_utils.actor import FSDPTrainRayActor as Actor

            args = case.args(**flags)
        else:
            from slime.backends.megatron_utils.actor import MegatronTrainRayActor as Actor

            args = megatron.megatron_args(case, 1, **flags)
        actor = Actor(args, rank, 1)
        actor.init(args, role, with_ref=args.use_kl_loss, checkpoint=checkpoint)
        return actor

    (root / "saved").mkdir()
    trained = start()
    trained.train(0, split_batch(trained.args, fsdp.make_rows(), dp_size=1, cp_size=1)[0])
    trained.save_to(str(root / "saved"), 1, force_sync=True)
    index = Path("fsdp") if backend == "fsdp" else Path()
    answers = {"honest": _answer(start, "load", root / "saved")}
    for attack, change in attacks(backend, index).items():
        path = root / attack
        shutil.copytree(root / "saved", path)
        change(path, root / f"marker {attack}")
        for read in READS if attack == "index" else ["load"]:
            answers[f"{attack} {read}"] = _answer(start, read, path)
    return answers


def _answer(start: Any, read: str, path: Path) -> str:
    try:
        READS[read](start, str(path))
    except UserError as error:
        return str(error)
    return "loaded"


def _assert_refused(answers: dict[str, str], folder: Path, backend: str) -> None:
    index = folder / "index" / ("fsdp/.metadata" if backend == "fsdp" else ".metadata")
    assert answers["honest"] == "loaded"
    for read in READS:
        assert str(index) in answers[f"index {read}"], answers
        assert hostile.ASKED_FOR in answers[f"index {read}"]
    assert TENSOR[backend].rpartition(".")[0] in answers["object load"]
    assert hostile.ASKED_FOR in answers["rng_0.pt load"]
    assert str(folder / "rng_0.pt" / "rng_0.pt") in answers["rng_0.pt load"]
    assert not list(folder.glob("marker*"))


def test_fsdp(tmp_path):
    model = make_tiny_checkpoint(tmp_path / "model")
    (answers,) = run_fsdp_ranks(_refusals, 1, "fsdp", str(model), str(tmp_path))
    _assert_refused(answers, tmp_path, "fsdp")


def test_megatron(tmp_path):
    pytest.importorskip("megatron.core")
    model = make_tiny_checkpoint(tmp_path / "model")
    (answers,) = run_megatron_ranks(_refusals, 1, "megatron", str(model), str(tmp_path))
    _assert_refused(answers, tmp_path, "megatron")
    assert hostile.ASKED_FOR in answers["common.pt load"]
    assert str(tmp_path / "common.pt" / "common.pt") in answers["common.pt load"]
    assert "in the format 'zarr'; slime reads torch_dist" in answers["zarr load"]
    for attack in ("index", "common.pt"):
        folders = f"--output-dir={tmp_path / 'out'}", f"--origin-hf-dir={model}"
        tool = ["tools/convert_torch_dist_to_hf.py", f"--input-dir={tmp_path / attack}", *folders]
        done = run_python(tool)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert hostile.ASKED_FOR in done.stderr
        assert not list(tmp_path.glob("marker*")) and not (tmp_path / "out").exists()


def test_objects_of_megatron_are_read_without_running_them(tmp_path):
    """Modules of TransformerEngine store objects, beside tensors."""
    pytest.importorskip("megatron.core")
    (said,) = run_megatron_ranks(_stored_objects, 1, str(tmp_path))
    assert hostile.ASKED_FOR in said
    assert not (tmp_path / "marker").exists()


def _stored_objects(rank: int, folder: str) -> str:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    from slime.backends.checkpoint_reader import plain_refusals

    def entry(data: Any) -> dict[str, ShardedObject]:
        return {"x": ShardedObject("x", data, (1,), (0,))}

    for name, data in (
        ("fine", torch.ones(2)),
        ("hostile", hostile.Payload(Path(folder, "marker"))),
    ):
        Path(folder, name).mkdir()
        dist_checkpointing.save(entry(data), f"{folder}/{name}")
    with plain_refusals():
        loaded = dist_checkpointing.load(entry(None), f"{folder}/fine")
    assert torch.equal(loaded["x"], torch.ones(2))
    with pytest.raises(UserError) as caught, plain_refusals():
        dist_checkpointing.load(entry(None), f"{folder}/hostile")
    return str(caught.value)


def test_weights_of_a_model_folder_that_are_a_pickle(tmp_path):
    """transformers reads pytorch_model.bin with weights_only; Megatron's reader takes safetensors alone."""
    from slime.weights.fp8 import load_causal_lm

    model = make_tiny_checkpoint(tmp_path / "model")
    (model / "model.safetensors").unlink()
    hostile.hostile_torch_file(model / "pytorch_model.bin", tmp_path / "marker")
    with pytest.raises(Exception, match=hostile.ASKED_FOR):
        load_causal_lm(str(model))
    assert not (tmp_path / "marker").exists()
