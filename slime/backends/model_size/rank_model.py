"""Tensor sizes of a trainer rank and of a full model, counted on the meta device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """Sizes on one trainer rank; `*_sizes` are histograms {bytes or elements: number of tensors}.

    Two of 64 GPUs that share a pipeline stage of GLM-4.5 hold `parameters=5_353_918_464` each, of
    which 4_718_592_000 are experts that no other rank has; the optimizer state of a rank covers all
    of those and half of the rest.
    """

    rank: int
    parameters: int
    expert_parameters: int
    trained_parameters: int
    weight_sizes: dict[int, int]  # bytes of parameters and buffers
    weight_storages: list[int]  # bytes of their storages, padding included
    gradient_storages: list[int]  # bytes of persistent gradient buffers; empty for FSDP
    master_sizes: dict[int, int]  # elements of the optimizer's fp32 master weights
    moment_sizes: dict[int, int]  # elements with two fp32 moments (Adam)
    dense_layers: int
    moe_layers: int
    has_embedding: bool
    has_head: bool
    momentum_sizes: dict[int, int] = field(default_factory=dict)  # with one moment (Muon, SGD)

    @property
    def weight_bytes(self) -> int:
        return sum(self.weight_storages)

    @property
    def gradient_bytes(self) -> int:
        return sum(self.gradient_storages)

    @property
    def master_bytes(self) -> int:
        return 4 * sum(size * count for size, count in self.master_sizes.items())

    @property
    def moment_bytes(self) -> int:
        twice = sum(size * count for size, count in self.moment_sizes.items())
        once = sum(size * count for size, count in self.momentum_sizes.items())
        return 8 * twice + 4 * once


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """Sizes of the full Hugging Face model, as engines load it: elements by part of the model."""

    total: int
    by_part: dict[str, int]  # part (`_PARTS` in whole_model.py) -> elements
    layer: int  # elements of the largest decoder layer
    buffers: int  # bytes
    largest_tensor: int  # elements; experts excluded


@dataclass(frozen=True, kw_only=True)
class ModelCount:
    whole: WholeModel
    ranks: list[RankModel]
    attention_repeats_keys: bool  # the installed torch's attention kernel has no GQA
    torch_version: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ModelCount:
        ranks = [_rank_from_json(rank) for rank in raw["ranks"]]
        return cls(**{**raw, "whole": WholeModel(**raw["whole"]), "ranks": ranks})


_BY_SIZE = ("weight_sizes", "master_sizes", "moment_sizes", "momentum_sizes")


def _rank_from_json(raw: dict[str, Any]) -> RankModel:
    sizes = {name: {int(k): v for k, v in raw[name].items()} for name in _BY_SIZE}
    return RankModel(**{**raw, **sizes})
