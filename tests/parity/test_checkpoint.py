"""Checkpoints: saved under one layout, loaded under another, with the optimizer; refused when foreign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.core.errors import UserError
from tests.args import make_args
from tests.parity.test_families import different_tensors, tokens
from tests.parity.tiny_families import FAMILIES, MOE, make_family
from tests.rank_pool import run_megatron_ranks

SAVED_AS: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
}
_BIASED_EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
SPREAD = {"expert_model_parallel_size": 2}
PLAIN = {"use_distributed_optimizer": False}
VIRTUAL = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
# A family, and the layouts it is trained in before and after a checkpoint.
TRAINED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", SAVED_AS, {}),
    "pipeline to tensor": ("qwen3", VIRTUAL, {"tensor_model_parallel_size": 4}),
    "experts": ("qwen3_moe", SAVED_AS, SPREAD),
    "dense, plain optimizer": ("qwen3", SAVED_AS | PLAIN, PLAIN),
    "pipeline to tensor, plain optimizer": (
        "qwen3",
        VIRTUAL | PLAIN,
        {"tensor_model_parallel_size": 2} | PLAIN,
    ),
    "experts, plain optimizer": ("qwen3_moe", SAVED_AS | PLAIN, SPREAD | PLAIN),
    "experts together again, plain optimizer": ("qwen3_moe", SPREAD | PLAIN, SAVED_AS | PLAIN),
    "delta nets": ("qwen3_5", SAVED_AS, {"context_parallel_size": 4}),
    "delta nets, pipeline to tensor": ("qwen3_5", VIRTUAL, {"tensor_model_parallel_size": 4}),
    "delta nets and experts": ("qwen3_next", SPREAD, SAVED_AS),
    "delta nets, plain optimizer": ("qwen3_5", SAVED_AS | PLAIN, PLAIN),
}


def saved_as(family: str) -> dict[str, Any]:
    return SAVED_AS | (_BIASED_EXPERTS if family == "gpt_oss" else {})


def loaded_as(family: str) -> dict[str, Any]:
    return {"expert_model_parallel_size": 2} if family in MOE else {}


def args_for(checkpoint: Path, flags: dict[str, Any]) -> Any:
    return make_args(
        train_backend="megatron",
        hf_checkpoint=str(checkpoint),
        actor_num_gpus_per_node=4,
        lr=1e-2,
        **flags,
    )


def save_and_load(rank: int, folder: str) -> dict[str, Any]:
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronModel

    root, results = Path(folder), {}
    for family in FAMILIES:
        saved = MegatronModel(args_for(root / family, saved_as(family)))
        saved.load(root / family)
        Checkpointer(family).save(new_folder(root / family / "saved", rank), 3, saved.chunks)
        other = MegatronModel(args_for(root / family, loaded_as(family)))
        facts = Checkpointer(family).load_model(root / family / "saved", other.chunks)
        results[family] = {
            "rollout_id": facts.rollout_id,
            "different": different_tensors(other.exported(), root / family, family),
        }
    results["refused"] = refused(root, rank)
    results["other precision"] = other_precision(root / "qwen3", rank)
    for number, (case, (family, saved, loaded)) in enumerate(TRAINED.items()):
        folder = new_folder(root / family / f"trained{number}", rank)
        results[case] = continue_elsewhere(root / family, folder, saved, loaded)
    results["other optimizer"] = other_optimizer(root / "qwen3")
    return results


def new_folder(path: Path, rank: int) -> Path:
    if rank == 0:
        path.mkdir()
    torch.distributed.barrier()
    return path


def refused(root: Path, rank: int) -> list[str]:
    """What is said of a checkpoint of another family, of other sizes, and of no checkpoint."""
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronModel

    model = MegatronModel(args_for(root / "qwen3", {}))
    texts = []
    for path in (root / "glm4_moe" / "saved", root / "wide" / "saved", root / "qwen3"):
        before = model.exported()
        if path.parent.name == "wide":
            wide = MegatronModel(args_for(root / "wide", {}))
            Checkpointer("qwen3").save(new_folder(path, rank), 0, wide.chunks)
            model = MegatronModel(args_for(root / "qwen3", {}))
            before = model.exported()
        with pytest.raises(UserError) as error:
            Checkpointer("qwen3").load_model(path, model.chunks)
        assert all(torch.equal(t, before[name]) for name, t in model.exported().items())
        texts.append(str(error.value))
    return texts


def other_precision(checkpoint: Path, rank: int) -> bool:
    """Whether a bfloat16 checkpoint fills a float32 model with its numbers."""
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronModel

    half = MegatronModel(args_for(checkpoint, {"bf16": True}))
    half.load(checkpoint)
    folder = new_folder(checkpoint / "half", rank)
    Checkpointer("qwen3").save(folder, 0, half.chunks)
    model = MegatronModel(args_for(checkpoint, SAVED_AS))
    Checkpointer("qwen3").load_model(folder, model.chunks)
    stored = load_file(checkpoint / "model.safetensors")
    return all(
        tensor.dtype == torch.float32 and torch.equal(tensor, stored[name].bfloat16().float())
        for name, tensor in model.exported().items()
    )


def other_optimizer(checkpoint: Path) -> str:
    """What is said by the distributed optimizer of a checkpoint that another one has made."""
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronTrainer

    model = MegatronTrainer(args_for(checkpoint, {}))
    saved = checkpoint / f"trained{list(TRAINED).index('dense, plain optimizer')}"
    with pytest.raises(UserError) as error:
        Checkpointer("qwen3").load(saved, model.chunks, model.optimizer)
    return str(error.value)


def continue_elsewhere(
    checkpoint: Path, folder: Path, saved_in: dict[str, Any], loaded_in: dict[str, Any]
) -> dict[str, float]:
    """A step, a save in the background, a second step; and that step after loading elsewhere."""
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronTrainer

    family = checkpoint.name
    trainer = MegatronTrainer(args_for(checkpoint, saved_in))
    trainer.load(checkpoint)
    before = trainer.exported()
    trainer.train(tokens())
    checkpointer = Checkpointer(family)
    checkpointer.save(
        folder,
        7,
        trainer.chunks,
        trainer.optimizer,
        num_steps=trainer.optimizer.num_steps,
        in_background=True,
    )
    saved = trainer.exported()
    trainer.train(tokens())
    unbroken = trainer.exported()
    checkpointer.wait()
    other = MegatronTrainer(args_for(checkpoint, loaded_in))
    Checkpointer(family).load(folder, other.chunks, other.optimizer)
    loaded = other.exported()
    other.train(tokens())
    return {
        "moved": largest_gap(saved, before),
        "moved again": largest_gap(unbroken, saved),
        "loaded": largest_gap(loaded, saved),
        "continued": largest_gap(other.exported(), unbroken),
        "num_steps": other.optimizer.num_steps,
    }


def largest_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make_family(folder / family, family)
    make_family(folder / "wide", "qwen3", hidden_size=48)
    assert load_file(folder / "wide" / "model.safetensors")["model.norm.weight"].shape == (48,)
    return run_megatron_ranks(save_and_load, 4, str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_survive_another_layout(results: list[dict], family: str) -> None:
    assert [rank[family] for rank in results] == [{"rollout_id": 3, "different": 0}] * 4


@pytest.mark.parametrize("case", TRAINED)
def test_training_goes_on_under_another_layout(results: list[dict], case: str) -> None:
    for rank in results:
        gaps = rank[case]
        assert gaps["moved"] > 5e-3 and gaps["moved again"] > 5e-3
        assert gaps["loaded"] == 0
        assert gaps["continued"] < 2e-4
        assert gaps["num_steps"] == 2


def test_foreign_checkpoints_are_refused(results: list[dict]) -> None:
    other_family, other_size, none = results[0]["refused"]
    assert "another architecture (glm4_moe)" in other_family and "absent" in other_family
    assert "another architecture" in other_size and "48" in other_size and "32" in other_size
    assert "is not a checkpoint of the Megatron trainer" in none


def test_a_checkpoint_of_another_optimizer_is_refused(results: list[dict]) -> None:
    for rank in results:
        assert "has no optimizer state" in rank["other optimizer"]
        assert "--use-distributed-optimizer" in rank["other optimizer"]


def test_checkpoint_of_another_precision(results: list[dict]) -> None:
    assert all(rank["other precision"] for rank in results)


def save_before_the_first_step(rank: int, folder: str, flags: dict[str, Any]) -> bool:
    """Whether a run that resumes from such a checkpoint trains as the one that went on."""
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronTrainer

    checkpoint = Path(folder) / "model"
    first = MegatronTrainer(args_for(checkpoint, flags))
    first.load(checkpoint)
    saved = new_folder(Path(folder) / "saved", rank)
    Checkpointer("qwen3").save(saved, 0, first.model, first.optimizer)
    second = MegatronTrainer(args_for(checkpoint, flags))
    facts = Checkpointer("qwen3").load(saved, second.model, second.optimizer)
    for trainer in (first, second):
        trainer.train(tokens())
    wanted, found = first.exported(), second.exported()
    return not facts.has_optimizer and all(torch.equal(found[n], wanted[n]) for n in wanted)


def leave_the_moments(rank: int, folder: str) -> tuple[bool, bool, bool]:
    """Whether moments that are not loaded are as good as none, differ from the saved ones, and resume."""
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronTrainer

    checkpoint = Path(folder) / "model"
    unbroken = MegatronTrainer(args_for(checkpoint, {}))
    unbroken.load(checkpoint)
    unbroken.train(tokens())
    both, model = (new_folder(Path(folder) / name, rank) for name in ("both", "weights"))
    Checkpointer("qwen3").save(both, 0, unbroken.model, unbroken.optimizer, num_steps=1)
    Checkpointer("qwen3").save(model, 0, unbroken.model, num_steps=1)
    fresh, none = (MegatronTrainer(args_for(checkpoint, {})) for _ in range(2))
    facts = Checkpointer("qwen3").load(both, fresh.model, fresh.optimizer, moments=False)
    assert not facts.has_optimizer
    Checkpointer("qwen3").load(model, none.model, none.optimizer)
    for trainer in (unbroken, fresh, none):
        trainer.train(tokens())
    wanted, found, whole = none.exported(), fresh.exported(), unbroken.exported()
    same = all(torch.equal(found[n], wanted[n]) for n in wanted)
    differ = not all(torch.equal(found[n], whole[n]) for n in whole)
    anew = new_folder(Path(folder) / "anew", rank)
    Checkpointer("qwen3").save(anew, 1, fresh.model, fresh.optimizer, num_steps=2)
    resumed = MegatronTrainer(args_for(checkpoint, {}))
    Checkpointer("qwen3").load(anew, resumed.model, resumed.optimizer)
    for trainer in (fresh, resumed):
        trainer.train(tokens())
    wanted, found = fresh.exported(), resumed.exported()
    return same, differ, all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_saved_moments_need_not_be_loaded(tmp_path):
    make_family(tmp_path / "model", "qwen3")
    assert run_megatron_ranks(leave_the_moments, 4, str(tmp_path)) == [(True, True, True)] * 4


@pytest.mark.parametrize("flags", [{}, PLAIN | {"bf16": True}], ids=["distributed", "plain"])
def test_a_checkpoint_before_the_first_update(tmp_path, flags):
    """As after a first step that was skipped, or of an actor that waits for its critic."""
    make_family(tmp_path / "model", "qwen3")
    found = run_megatron_ranks(save_before_the_first_step, 4, str(tmp_path), flags)
    assert found == [True] * 4
