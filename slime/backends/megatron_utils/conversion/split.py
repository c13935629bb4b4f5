"""How a model is spread over the ranks that convert it: pipeline stages of about equal size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from slime.backends.megatron_utils.hf_weights.reader import TensorReader
from slime.backends.megatron_utils.hf_weights.rules import WeightMap


@dataclass(frozen=True)
class ModelSizes:
    """Elements of what stands before the layers, of each layer, and of what stands behind them."""

    before: int
    layers: tuple[int, ...]
    behind: int


def model_sizes(weights: WeightMap, reader: TensorReader) -> ModelSizes:
    names = set(reader.names())
    layers = [0] * weights.num_layers
    ends = {False: 0, True: 0}
    for rule in weights.rules:
        if not rule.per_layer:
            ends[rule is not weights.rules[0]] += _elements(rule.hf_names(), names, reader)
    for name in names:
        layer = _layer_of(name)
        if layer is not None and layer < weights.num_layers:
            layers[layer] += prod(reader.shape(name))
    return ModelSizes(ends[False], tuple(layers), ends[True])


def stages(sizes: ModelSizes, world_size: int) -> list[int]:
    """Layers of each stage: as many stages as ranks, or the most that divide them, at least a layer
    each, and the largest as small as can be.

    >>> stages(ModelSizes(before=10, layers=(10, 10, 10, 10), behind=10), 3)
    [1, 2, 1]
    """
    most = len(sizes.layers)
    count = max(n for n in range(1, world_size + 1) if world_size % n == 0 and n <= most)
    costs = list(sizes.layers)
    costs[0] += sizes.before
    costs[-1] += sizes.behind
    return _cut(costs, count)


def layout_text(layers_of_stages: list[int]) -> str:
    """For --pipeline-model-parallel-layout: `Ett|ttt|tL`."""
    return "E" + "|".join("t" * count for count in layers_of_stages) + "L"


def _cut(costs: list[int], count: int) -> list[int]:
    """Cut a row into `count` runs so that the largest sum is least; by dynamic programming."""
    total = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n] = (largest sum, lengths) of the first n items in the runs made so far
    best: list[tuple[float, list[int]]] = [(sums[n], [n]) for n in range(total + 1)]
    for run in range(2, count + 1):
        best = [
            min(
                (
                    (max(best[m][0], sums[n] - sums[m]), [*best[m][1], n - m])
                    for m in range(run - 1, n)
                ),
                default=(float("inf"), []),
            )
            for n in range(total + 1)
        ]
    return best[total][1]


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 2 else None


def _elements(wanted: Iterable[str], names: set[str], reader: TensorReader) -> int:
    return sum(prod(reader.shape(name)) for name in wanted if name in names)
