"""Device memory of the adapters: a fixed number of slots for every linear layer that takes adapters.

Linears that share an input and run as one matmul (query, key, value; gate, up) share one buffer. For n of
them, rank R and S slots::

    a  [S, n * R, in]      rows p * R .. p * R + r are lora_A of linear p (see `rows_below`)
    b  [S, out, R]         rows of linear p are its lora_B, in the first r columns

The sizes never change, so one CUDA graph serves every adapter; unused rows and columns are zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from slime.config.checks.model_types import in_tower
from slime.config.peft_files import DOWN, EXPERTS, GATE_UP, PeftSettings, flat_name, peft_shapes
from slime.engine.kernels.interface import AdapterRows, Affine, ExpertLora, LayerLora, LoraWeights
from slime.engine.kernels.lora import add_lora
from slime.engine.lora.experts import (
    LEAVES,
    ExpertsWithAdapters,
    flattened,
    make_slots,
    stacked,
    takes_adapters,
)
from slime.engine.lora.peft_format import LoraPair
from slime.engine.scheduler.sampling_params import RequestError

# Fuse A into the base's matmul if it has at most 1/8 as many rows: it computes all slots for every token.
_JOINED_SHARE = 8


class LoraBank:
    """`modules` are the linears that adapters can bind to: weights and index of each in its buffer.

    Empty `targets`: all linears. `experts` names parameters of MoE experts, or is "experts" for both.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        rank: int,
        targets: Iterable[str] = (),
        experts: Iterable[str] = (),
    ) -> None:
        self.num_slots, self.rank = num_slots, rank
        self.modules: dict[str, tuple[LoraWeights | ExpertLora, int]] = {}
        self.rows: AdapterRows | None = None  # of the forward that runs on Hugging Face modules
        self._model = model
        self._targets, self._experts = frozenset(targets), frozenset(experts)
        self._names = {module: flat_name(name) for name, module in model.named_modules()}
        self._seen: set[str] = set()
        self.bindings = num_slots * [0]  # how often modules or ranks of each slot changed
        scales = torch.zeros(num_slots, dtype=torch.float32, device=model.device)
        model.register_buffer("lora_scales", scales, persistent=False)
        self._scales = scales

    def rows_below(self, linears: tuple[nn.Linear, ...]) -> int:
        """Return the rows of A of all slots, if they should follow the base's weight; else 0."""
        rows = self.num_slots * len(linears) * self.rank
        few = rows * _JOINED_SHARE <= sum(linear.out_features for linear in linears)
        return rows if few and self._takes(linears) else 0

    def _takes(self, linears: tuple[nn.Linear, ...]) -> bool:
        names = [self._names[linear].split(".")[-1] for linear in linears]
        return not self._targets or not self._targets.isdisjoint(names)

    def attach(
        self, linears: tuple[nn.Linear, ...], joined: Affine | None = None
    ) -> LoraWeights | None:
        """Allocate the slots of linears that share an input; None if none of them is a target.

        `joined` is their weight with space for A below.
        """
        if not self._takes(linears):
            return None
        first = linears[0]
        widths = tuple(linear.out_features for linear in linears)
        shape_a = (self.num_slots, len(linears) * self.rank, first.in_features)
        shape_b = (self.num_slots, sum(widths), self.rank)
        like = first.weight
        b = torch.zeros(shape_b, dtype=like.dtype, device=like.device)
        if b.device.type == "cpu":  # the fastest memory layout for matmuls with few rows
            b = b.transpose(1, 2).contiguous().transpose(1, 2)
        if joined is None:
            a = torch.zeros(shape_a, dtype=like.dtype, device=like.device)
        else:
            a = joined[0][sum(widths) :][: shape_a[0] * shape_a[1]].view(shape_a)
        weights = LoraWeights(
            a=a,
            b=b,
            joined=joined,
            widths=widths,
            scales=self._scales,
            ranks=np.zeros((self.num_slots, len(linears)), np.int32),
        )
        # Buffers of the module, so that they move with it when memory is released.
        first.register_buffer("lora_a", weights.a, persistent=False)
        first.register_buffer("lora_b", weights.b, persistent=False)
        for index, linear in enumerate(linears):
            self.modules[self._names[linear]] = (weights, index)
        return weights

    def attach_experts(self, experts: nn.Module) -> LayerLora | None:
        """Allocate the slots of a layer's experts only if targets name them: they need much memory."""
        name = self._names[experts]
        if not takes_adapters(experts):
            return None
        found: dict[str, ExpertLora | None] = dict.fromkeys(LEAVES)
        for leaf in LEAVES:
            if not self._experts.isdisjoint((EXPERTS, leaf)):
                slots = make_slots(
                    experts.get_parameter(leaf), self.num_slots, self.rank, self._scales
                )
                experts.register_buffer(f"{leaf}_lora_a", slots.a, persistent=False)
                experts.register_buffer(f"{leaf}_lora_b", slots.b, persistent=False)
                self.modules[f"{name}.{leaf}"] = (slots, 0)
                found[leaf] = slots
        if not any(found.values()):
            return None
        return LayerLora(gate_up=found[GATE_UP], down=found[DOWN])

    def hook_experts(self, experts: nn.Module) -> None:
        """Apply adapters in the forward of Hugging Face experts, to the rows in `self.rows`."""
        lora, name = self.attach_experts(experts), self._names[experts]
        if lora is not None:
            experts.forward = ExpertsWithAdapters(experts, lora, lambda: self._rows_of(name))

    def _rows_of(self, name: str) -> AdapterRows | None:
        self._seen.update(f"{name}.{leaf}" for leaf in LEAVES)
        return self.rows

    def hook_linears(self) -> None:
        """Apply adapters by forward hooks in the Hugging Face linears, except the output layer."""
        head = self._model.get_output_embeddings()
        for name, module in list(self._model.named_modules()):
            if in_tower(name):
                continue
            if isinstance(module, nn.Linear) and module is not head:
                weights = self.attach((module,))
                if weights is not None:
                    hook = self._make_hook(self._names[module], weights)
                    module.register_forward_hook(hook)
            elif name.endswith(f".{EXPERTS}"):
                self.hook_experts(module)

    def forget_unused(self) -> None:
        """Remove linears whose hooks did not run in the first forward: adapters would have no effect there."""
        self.modules = {name: site for name, site in self.modules.items() if name in self._seen}

    def check(self, config: PeftSettings, pairs: dict[str, LoraPair]) -> None:
        """Raise RequestError unless every matrix binds to a module of its shape, and none is missing."""
        if config.rank > self.rank:
            raise RequestError(
                f"rank {config.rank} does not fit: start the engine with --max-lora-rank {config.rank}"
            )
        unbound = [module for module in pairs if module not in self.modules]
        if unbound or not pairs:
            one = (unbound or ["none given"])[0]
            experts = f": start the engine with --lora-target-modules all {EXPERTS}"
            raise RequestError(
                f"{len(unbound)} of {len(pairs)} modules bind to nothing in this model, e.g. "
                f"{one}{experts if f'.{EXPERTS}.' in one else ''}"
            )
        for target in config.complete:
            wanted = [m for m in self.modules if m == target or m.endswith(f".{target}")]
            missing = [module for module in wanted if module not in pairs]
            if missing or not wanted:
                raise RequestError(
                    f"target module {target!r} is not complete: there are no matrices for "
                    f"{(missing or ['any module of this model'])[0]}"
                )
        for module, pair in pairs.items():
            self._check_shapes(module, pair, config.rank)
        # Kernels multiply masked tokens of other adapters by 0, and 0 * inf is NaN.
        sums = [t.float().abs().amax() for pair in pairs.values() for t in (pair.a, pair.b)]
        if not torch.stack(sums).isfinite().all():
            raise RequestError("the adapter holds values that are not finite")

    def _check_shapes(self, module: str, pair: LoraPair, rank: int) -> None:
        for side, sent, shape in zip(
            "AB", (pair.a, pair.b), self._shapes(module, rank), strict=True
        ):
            if list(sent.shape) != shape:
                raise RequestError(
                    f"{module}.lora_{side}: shape {list(sent.shape)}, this base and r {rank} need {shape}"
                )

    def _shapes(self, module: str, rank: int) -> tuple[list[int], list[int]]:
        a, b = self._views(module, 0, rank)
        return peft_shapes([*b.shape[:-1], a.shape[-1]], rank)

    def write(self, slot: int, config: PeftSettings, pairs: dict[str, LoraPair]) -> None:
        """Copy an adapter that passed `check` into its slot."""
        if self.bound_ranks(slot) != dict.fromkeys(pairs, config.rank):
            self.clear(slot)
        for name in pairs:
            weights, index = self.modules[name]
            weights.ranks.reshape(self.num_slots, -1)[slot, index] = config.rank  # a view
        held = self.matrices(slot, dict.fromkeys(pairs, config.rank))
        torch._foreach_copy_(held, self.as_in_slots(pairs))  # pyright: ignore[reportPrivateImportUsage]
        self._scales[slot] = config.scaling

    def matrices(self, slot: int, ranks: dict[str, int]) -> list[torch.Tensor]:
        """Return views of A and B of each module in the slot."""
        return [view for name, rank in ranks.items() for view in self._views(name, slot, rank)]

    def as_in_slots(self, pairs: dict[str, LoraPair]) -> list[torch.Tensor]:
        """Return A and B of each module as views in the shapes of `matrices`."""
        shaped: list[torch.Tensor] = []
        for name, pair in pairs.items():
            weights, _ = self.modules[name]
            is_experts = isinstance(weights, ExpertLora)
            shaped += (
                stacked(pair.a, pair.b, weights.a.shape[1]) if is_experts else (pair.a, pair.b)
            )
        return shaped

    def bound_ranks(self, slot: int) -> dict[str, int]:
        """Return the modules that have an adapter in this slot, and its rank in each."""
        return {name: rank for name in self.modules if (rank := self._rank_of(name, slot))}

    def addresses(self) -> list[int]:
        """Return the addresses of the slots, which change when memory is released and resumed."""
        buffers = {id(weights): weights for weights, _ in self.modules.values()}
        return [t.data_ptr() for weights in buffers.values() for t in (weights.a, weights.b)]

    def shapes(self, slot: int, module: str) -> tuple[list[int], list[int]]:
        """Return the shapes of A and B that a slot holds, in PEFT's layout."""
        return self._shapes(module, self._rank_of(module, slot))

    def clear(self, slot: int) -> None:
        for name, (weights, _) in self.modules.items():
            if self._rank_of(name, slot):
                weights.a[slot].zero_()
                weights.b[slot].zero_()
                weights.ranks[slot] = 0
        self._scales[slot] = 0.0
        self.bindings[slot] += 1

    def read(self, slot: int, module: str) -> LoraPair:
        """Return the matrices of a module in a slot, in PEFT's layout."""
        a, b = self._views(module, slot, self._rank_of(module, slot))
        if isinstance(self.modules[module][0], ExpertLora):
            a, b = flattened(a, b)
        return LoraPair(a=a, b=b)

    def _rank_of(self, module: str, slot: int) -> int:
        weights, index = self.modules[module]
        return int(weights.ranks[slot].flat[index])

    def _views(self, module: str, slot: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights, index = self.modules[module]
        if isinstance(weights, ExpertLora):
            return weights.a[slot, :, :rank], weights.b[slot, :, :, :rank]
        first, start = index * self.rank, sum(weights.widths[:index])
        columns = slice(start, start + weights.widths[index])
        return weights.a[slot, first : first + rank], weights.b[slot, columns, :rank]

    def _make_hook(self, name: str, weights: LoraWeights):
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            self._seen.add(name)
            if self.rows is not None:
                x = inputs[0].reshape(-1, inputs[0].shape[-1])
                add_lora(output.view(-1, output.shape[-1]), x, weights, self.rows)

        return hook
