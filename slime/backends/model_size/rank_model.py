"""What a trainer rank and a whole model hold, counted on modules that take no memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """One rank of the trainer. Sizes of tensors are kept as {bytes or elements: how many}.

    Two of 64 GPUs that share a stage of GLM-4.5 hold `parameters=5_353_918_464` each, of which
    4_718_592_000 are experts nobody else has; the optimizer owns all of those and half of the rest.
    """

    rank: int
    parameters: int
    expert_parameters: int
    trained_parameters: int
    weight_sizes: dict[int, int]  # bytes of parameters and buffers
    weight_storages: list[int]  # bytes of the memory they lie in, padding included
    gradient_storages: list[int]  # bytes that live as long as the model; empty for FSDP
    master_sizes: dict[int, int]  # elements of fp32 copies the optimizer makes
    moment_sizes: dict[int, int]  # elements, each of which has two moments in fp32
    dense_layers: int
    moe_layers: int
    has_embedding: bool
    has_head: bool
    momentum_sizes: dict[int, int] = field(default_factory=dict)  # elements with one (Muon, SGD)

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
    """The Hugging Face model, as engines load it: elements by the part of the model they belong to."""

    total: int
    by_part: dict[str, int]  # embedding, head, attention, kv, mlp, shared, experts, router, other
    layer: int  # elements of the largest decoder layer
    buffers: int  # bytes
    largest_tensor: int  # elements


@dataclass(frozen=True, kw_only=True)
class ModelCount:
    whole: WholeModel
    ranks: list[RankModel]
    attention_repeats_keys: bool  # the installed torch's kernel wants as many key heads as queries
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
