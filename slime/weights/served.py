"""Whether SGLang servers hold what was sent, by their own checksums."""

from __future__ import annotations

import torch

from slime.core.errors import WeightMismatchError
from slime.weights.engine_client import EngineClient, RankSums, on_all
from slime.weights.sglang_layout import Cuts, ModelFacts, ServedSums, cuts_of
from slime.weights.verify import some


class ServedCheck:
    """For one update: sums what is sent as the servers hold it, and compares.

    Where the layout of a server is not known its sums are compared with those of the other engines;
    what neither shows is left to the probe prompt.
    """

    def __init__(self, engines: list[EngineClient], model: ModelFacts) -> None:
        self._engines, self._fp8 = engines, model.fp8
        self._cuts: list[Cuts | None] = on_all(engines, lambda engine: _cuts(engine, model))
        self._sums = {cuts: ServedSums(cuts) for cuts in self._cuts if cuts is not None}
        self._summable, self._sent_columns = True, 1

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._fp8 is not None and name.endswith(".weight_scale_inv"):
            # SGLang's checksum divides columns by scales, and fails where a block is cut off.
            self._summable &= self._sent_columns % tensor.shape[1] == 0
        self._sent_columns = tensor.shape[-1] if tensor.ndim else 1
        for sums in self._sums.values():
            sums.add(name, tensor)

    def compare(self, version: int) -> None:
        if not self._summable:
            return
        held = on_all(self._engines, EngineClient.served_checksums)
        for engine, cuts, ranks in zip(self._engines, self._cuts, held, strict=True):
            problem = "" if cuts is None else _difference(self._sums[cuts], ranks)
            if problem:
                raise WeightMismatchError(
                    f"weights {version} did not arrive intact. engine {engine.url}: {problem}"
                )
            self._compare_with_first(engine, ranks, held[0], version)

    def _compare_with_first(
        self, engine: EngineClient, ranks: list[RankSums], first: list[RankSums], version: int
    ) -> None:
        if len(ranks) != len(first) or ranks == first:
            return
        names = [
            name
            for mine, other in zip(ranks, first, strict=True)
            for name, value in mine.sums.items()
            if other.sums.get(name) != value
        ]
        raise WeightMismatchError(
            f"weights {version}: engines {engine.url} and {self._engines[0].url} hold different "
            f"values of {len(names)} parameters ({some(names)})"
        )


def _cuts(engine: EngineClient, model: ModelFacts) -> Cuts | None:
    return cuts_of(engine.server_info(), engine.architectures(), model)


def _difference(expected: ServedSums, ranks: list[RankSums]) -> str:
    """In words; empty when there is none. A tied output layer is sent once and held once or twice."""
    groups: dict[str, list[str]] = {"differ": [], "are in the engine but were not sent": []}
    held = {name for rank in ranks for name in rank.sums}
    for rank in ranks:
        sums = expected.sums[rank.tp_rank]
        groups["differ"] += [n for n, value in rank.sums.items() if sums.get(n, value) != value]
        groups["are in the engine but were not sent"] += [
            name for name in rank.sums if name not in sums and not _may_be_unsent(name, expected)
        ]
    groups["were sent but are not in the engine"] = [n for n in expected.sums[0] if n not in held]
    return ", ".join(
        f"{len(names)} of {len(held)} parameters {what} ({some(names)})"
        for what, names in groups.items()
        if names
    )


def _may_be_unsent(name: str, expected: ServedSums) -> bool:
    """An output layer that is tied; experts that could not be summed here."""
    experts = ".experts." in name and not any(".experts." in other for other in expected.sums[0])
    return name.startswith("lm_head.") or experts
