"""Every family: Hugging Face -> Megatron, equal logits and gradients; -> Hugging Face again, identical.

One group of four processes goes through all families and layouts: importing takes longest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from slime.core.errors import UserError
from slime.weights.buckets import hf_views
from tests.args import make_args
from tests.parity.tiny_families import (
    DELTA_NETS,
    FAMILIES,
    MOE,
    ROPES,
    UNTRAINED,
    VOCAB_SIZE,
    make_family,
    make_model,
)
from tests.rank_pool import run_megatron_ranks, start_workers

LENS = [7, 12, 3]
TOLERANCE = 1e-4  # of the largest logit, and of the largest gradient of a tensor

NAMES = [*FAMILIES, *ROPES]
ONE = {"tensor_model_parallel_size": 1}
DENSE_LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": ONE,
    "TP2 SP PP2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
    },
    "TP4": {"tensor_model_parallel_size": 4},
    "PP2 VPP2": {
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
    },
}
MOE_LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert_model_parallel_size": 2},
    "TP2 SP PP2 EP2 ETP1": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}


CONTEXT = {
    "CP2": {"context_parallel_size": 2},
    "TP2 SP CP2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 2,
    },
}
# More tensor ranks than KV heads; the MoE needs sequence parallelism.
MANY_RANKS = {"TP4 SP": {"tensor_model_parallel_size": 4, "sequence_parallel": True}}


def layouts_of(family: str) -> dict[str, dict[str, Any]]:
    """All layouts for families with experts or delta nets and two dense ones, two for the others."""
    if family in ROPES:
        return {"one process": ONE}
    context = {"CP2": CONTEXT["CP2"]}
    if family in DELTA_NETS:
        moe = MOE_LAYOUTS if family in MOE else {"TP4": DENSE_LAYOUTS["TP4"]}
        virtual = {name: DENSE_LAYOUTS[name] for name in ("one process", "PP2 VPP2")}
        return virtual | moe | MANY_RANKS | CONTEXT
    if family in MOE:
        return {"one process": ONE, **MOE_LAYOUTS, **context}
    if family in ("qwen3", "glm4"):
        return DENSE_LAYOUTS | context
    return {name: DENSE_LAYOUTS[name] for name in ("one process", "TP2 SP PP2")}


def tokens(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length) for length in LENS]


def model_of(name: str) -> tuple[str, dict[str, Any]]:
    """A family and what is changed of its config."""
    family, rope = ROPES.get(name, (name, None))
    return family, {} if rope is None else {"rope_parameters": rope}


def reference(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradients of the negative log-probs of the next tokens by checkpoint name."""
    family, changes = model_of(name)
    model = make_model(family, **changes)
    rows = [torch.from_numpy(row)[None] for row in tokens()]
    logits = [model(row).logits[0] for row in rows]
    pairs = zip(logits, rows, strict=True)
    sum(F.cross_entropy(x[:-1], row[0, 1:], reduction="sum") for x, row in pairs).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    views = dict(hf_views(grads.items(), model_type=model.config.model_type))
    return torch.cat(logits).detach(), {name: grad.clone() for name, grad in views.items()}


def check_everything(rank: int, folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    from tests.parity.megatron_model import MegatronTrainer

    results: dict[tuple[str, str], dict[str, Any]] = {}
    for family in NAMES:
        checkpoint = Path(folder) / family
        logits, gradients = torch.load(checkpoint / "reference.pt")
        for layout, flags in layouts_of(family).items():
            args = make_args(
                train_backend="megatron",
                hf_checkpoint=str(checkpoint),
                actor_num_gpus_per_node=4,
                use_distributed_optimizer=False,  # whose ranks hold parts of the gradient
                **flags,
            )
            model = MegatronTrainer(args)
            model.load(checkpoint)
            cut = layout in CONTEXT  # then a rank has the logits of some tokens
            results[family, layout] = {
                "logits": None if cut else relative_gap(model.logits(tokens()), logits),
                "exported": different_tensors(model.exported(), checkpoint, family),
                "gradients": largest_gap(model.gradients(tokens()), gradients),
            }
    results["qwen3", "refused"] = refusals(Path(folder) / "qwen3")
    return results


def refusals(checkpoint: Path) -> dict[str, Any]:
    """What is said of a folder without a tensor, or with one of another shape; nothing is changed."""
    from slime.backends.megatron_utils.hf_weights.local_weights import load_hf
    from tests.dict_reader import DictReader
    from tests.parity.megatron_model import MegatronModel

    args = make_args(
        train_backend="megatron", hf_checkpoint=str(checkpoint), actor_num_gpus_per_node=4
    )
    model = MegatronModel(args)
    before = model.exported()
    stored = load_file(checkpoint / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    texts: dict[str, Any] = {}
    for kind, changed in (("missing", None), ("other shape", torch.zeros(47, 32))):
        tensors = {k: v for k, v in stored.items() if k != name}
        if changed is not None:
            tensors[name] = changed
        with pytest.raises(UserError) as error:
            load_hf(model.chunks, model.weights, DictReader(tensors))
        texts[kind] = str(error.value)
    after = model.exported()
    texts["unchanged"] = all(torch.equal(after[key], before[key]) for key in before)
    return texts


def relative_gap(logits: torch.Tensor | None, reference: torch.Tensor) -> float:
    """0 on ranks of a pipeline that have no logits."""
    if logits is None:
        return 0.0
    assert logits.shape == reference.shape
    return float((logits - reference).abs().max() / reference.abs().max())


def largest_gap(gradients: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Relative to the largest gradient of each tensor."""
    return max(
        float((gradients[name] - grad).abs().max() / grad.abs().max())
        for name, grad in wanted.items()
    )


def different_tensors(exported: dict[str, torch.Tensor], checkpoint: Path, family: str) -> float:
    """How many tensors are missing, too many, or not the same to the bit."""
    stored = load_file(checkpoint / "model.safetensors")
    for name in UNTRAINED.get(model_of(family)[0], []):
        del stored[name]
    different = len(stored.keys() ^ exported.keys())
    for name in stored.keys() & exported.keys():
        same = exported[name].dtype == stored[name].dtype and torch.equal(
            exported[name], stored[name]
        )
        different += not same
    return float(different)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    start_workers(4)
    folder = tmp_path_factory.mktemp("families")
    for name in NAMES:
        family, changes = model_of(name)
        make_family(folder / name, family, **changes)
        torch.save(reference(name), folder / name / "reference.pt")
    return run_megatron_ranks(check_everything, 4, str(folder))


CASES = [(family, layout) for family in NAMES for layout in layouts_of(family)]


@pytest.mark.parametrize(("family", "layout"), [c for c in CASES if c[1] not in CONTEXT])
def test_logits_equal_hugging_face(results: list[dict], family: str, layout: str) -> None:
    assert max(rank[family, layout]["logits"] for rank in results) < TOLERANCE


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_gradients_equal_hugging_face(results: list[dict], family: str, layout: str) -> None:
    assert max(rank[family, layout]["gradients"] for rank in results) < TOLERANCE


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_exported_tensors_are_identical(results: list[dict], family: str, layout: str) -> None:
    assert [rank[family, layout]["exported"] for rank in results] == [0, 0, 0, 0]


def test_a_missing_or_misshapen_tensor_is_named(results: list[dict]) -> None:
    for rank in results:
        said = rank["qwen3", "refused"]
        assert said["missing"] == "there is no tensor model.layers.3.mlp.up_proj.weight"
        assert "model.layers.3.mlp.up_proj.weight [47, 32]" in said["other shape"]
        assert said["unchanged"]
