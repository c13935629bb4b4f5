"""Scales of FP8 delayed scaling in a checkpoint: plain tensors, loaded under any layout, by a resumed run.

TransformerEngine needs a GPU, so modules with its `fp8_meta` are put into our layers here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity.test_checkpoint import args_for, new_folder
from tests.parity.tiny_families import make_family
from tests.rank_pool import run_megatron_ranks

PIPELINE = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
EXPERTS = {"expert_model_parallel_size": 2}
SLOTS = {"fwd": 3, "bwd": 2}  # of one matmul: input, weight, output; gradients of output and input


class Fp8Linear(torch.nn.Module):
    """What a checkpoint sees of a linear layer of TransformerEngine, grouped where it has experts."""

    def __init__(self, num_gemms: int, history: int) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.history = history
        self.fp8_meta: dict[str, Any] = {}

    def init_fp8_meta_tensors(self, recipe: object) -> None:
        for way, slots in SLOTS.items():
            count = slots * self.fp8_meta["num_gemms"]
            self.fp8_meta[f"scaling_{way}"] = SimpleNamespace(
                scale=torch.ones(count), amax_history=torch.zeros(self.history, count)
            )


def with_fp8(trainer: Any, history: int = 4) -> list[tuple[int, int, Fp8Linear]]:
    """Put such modules into every layer; return (layer, first expert, module)."""
    from megatron.core import parallel_state

    found = []
    trainer.config.fp8, trainer.config.fp8_recipe = "hybrid", "delayed"
    for chunk in trainer.chunks:
        for layer in chunk.decoder.layers:
            layer.self_attention.fp8 = Fp8Linear(1, history)
            found.append((layer.layer_number, 0, layer.self_attention.fp8))
            if hasattr(layer.mlp, "experts"):
                local = layer.mlp.num_local_experts
                layer.mlp.experts.linear_fc1 = Fp8Linear(local, history)
                first = local * parallel_state.get_expert_model_parallel_rank()
                found.append((layer.layer_number, first, layer.mlp.experts.linear_fc1))
    return found


def value(layer: int, way: str, part: str, row: int, slot: int) -> float:
    """One number for every entry of the whole model, whatever rank it is on."""
    return layer * 1000.0 + slot * 10.0 + row + 0.25 * (way == "bwd") + 0.5 * (part == "scale")


def expected(layer: int, first: int, module: Fp8Linear, way: str, part: str) -> torch.Tensor:
    slots = range(SLOTS[way] * first, SLOTS[way] * (first + module.num_gemms))
    rows = range(module.history) if part == "amax_history" else [0]
    found = torch.tensor([[value(layer, way, part, r, slot) for slot in slots] for r in rows])
    return found if part == "amax_history" else found[0]


def save_as(rank: int, checkpoint: str, folder: str, flags: dict[str, Any]) -> None:
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronTrainer

    trainer = MegatronTrainer(args_for(Path(checkpoint), flags))
    trainer.load(Path(checkpoint))
    for layer, first, module in with_fp8(trainer):
        module.fp8_meta["num_gemms"] = module.num_gemms
        module.init_fp8_meta_tensors(None)
        for way in SLOTS:
            for part in ("scale", "amax_history"):
                tensor = getattr(module.fp8_meta[f"scaling_{way}"], part)
                tensor.copy_(expected(layer, first, module, way, part))
    Checkpointer("x").save(new_folder(Path(folder), rank), 0, trainer.model)


def load_as(
    rank: int, checkpoint: str, folder: str, flags: dict[str, Any], history: int
) -> list[Any]:
    """Return per module whether every tensor is as expected, and what was logged."""
    from slime.backends.megatron_utils import checkpoint_state
    from slime.backends.megatron_utils.checkpoint import Checkpointer
    from tests.parity.megatron_model import MegatronTrainer

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    checkpoint_state.logger.addHandler(handler)
    trainer = MegatronTrainer(args_for(Path(checkpoint), flags))
    modules = with_fp8(trainer, history)
    Checkpointer("x").load(folder, trainer.model, trainer.optimizer)
    checkpoint_state.logger.removeHandler(handler)
    same = [
        torch.equal(
            getattr(module.fp8_meta[f"scaling_{way}"], part),
            expected(layer, first, module, way, part),
        )
        for layer, first, module in modules
        for way in SLOTS
        for part in ("scale", "amax_history")
    ]
    return [same, said]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8")
    for family in ("qwen3", "qwen3_moe"):
        make_family(root / family, family)
    run_megatron_ranks(save_as, 4, str(root / "qwen3"), str(root / "dense"), PIPELINE)
    run_megatron_ranks(save_as, 4, str(root / "qwen3_moe"), str(root / "moe"), EXPERTS)
    return root


@pytest.mark.parametrize(
    ("family", "name", "flags"),
    [
        ("qwen3", "dense", PIPELINE),
        ("qwen3", "dense", {"tensor_model_parallel_size": 2}),
        ("qwen3_moe", "moe", EXPERTS),
        ("qwen3_moe", "moe", {"expert_model_parallel_size": 4}),
        ("qwen3_moe", "moe", {}),
    ],
)
def test_scales_come_back_under_any_layout(saved: Path, family: str, name: str, flags: Any):
    results = run_megatron_ranks(load_as, 4, str(saved / family), str(saved / name), flags, 4)
    for same, said in results:
        assert same and all(same) and not said


def test_a_history_of_another_length_starts_anew(saved: Path):
    """The scales, whose shape does not depend on it, are loaded."""
    (same, said), *_ = run_megatron_ranks(
        load_as, 4, str(saved / "qwen3"), str(saved / "dense"), {}, 2
    )
    scales, histories = same[::2], same[1::2]
    assert all(scales) and not any(histories)
    assert len(said) == 1 and "--fp8-amax-history-len" in said[0]


def test_scales_are_plain_tensors(saved: Path):
    from megatron.core import dist_checkpointing

    stored = dist_checkpointing.load_tensors_metadata(str(saved / "moe"))
    names = [name for name in stored if name.startswith("fp8.")]
    assert "fp8.decoder.layers.0.mlp.experts.linear_fc1.amax_history_bwd" in names
    assert not any("_extra_state" in name for name in stored)
