"""Adapters of MoE experts: their slots, PEFT's layout of them, and Hugging Face experts that apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from slime.config.peft_files import DOWN, GATE_UP
from slime.engine.kernels.interface import AdapterRows, ExpertLora, LayerLora

LEAVES = (GATE_UP, DOWN)


def takes_adapters(experts: Any) -> bool:
    """Return whether these are gated experts in two plain 3-D parameters, [E, out, in]."""
    special = ("is_transposed", "has_bias", "has_post_expert_norm")
    shaped = all(getattr(getattr(experts, leaf, None), "ndim", 0) == 3 for leaf in LEAVES)
    return (
        shaped
        and getattr(experts, "has_gate", False)
        and not any(getattr(experts, name, False) for name in special)
    )


def make_slots(weight: torch.Tensor, num_slots: int, rank: int, scales: torch.Tensor) -> ExpertLora:
    count, rows, columns = weight.shape
    like = {"dtype": weight.dtype, "device": weight.device}
    return ExpertLora(
        a=torch.zeros(num_slots, count, rank, columns, **like),
        b=torch.zeros(num_slots, count, rows, rank, **like),
        scales=scales,
        ranks=np.zeros(num_slots, np.int32),
    )


def stacked(
    a: torch.Tensor, b: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views [E, r, in] and [E, out, r] of PEFT's A [E * r, in] and B [out, r * E]."""
    return (
        a.unflatten(0, (num_experts, -1)),
        b.unflatten(1, (-1, num_experts)).permute(2, 0, 1),
    )


def flattened(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PEFT's layout, the inverse of `stacked`."""
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


class ExpertsWithAdapters:
    """Forward of Hugging Face experts with adapters. Rows without one get the module's output, bit for bit."""

    def __init__(
        self, experts: Any, lora: LayerLora, rows: Callable[[], AdapterRows | None]
    ) -> None:
        self._experts, self._lora, self._rows = experts, lora, rows
        self._plain = experts.forward

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows = self._rows()
        if rows is None:
            return self._plain(hidden, chosen, weights)
        total = sum(len(index) for _, index in rows.groups)
        out = self._plain(hidden, chosen, weights) if total < len(hidden) else hidden.clone()
        for slot, index in rows.groups:
            if rows.fixed:
                found = self._pair_by_pair(slot, hidden, chosen, weights).index_select(0, index)
            else:
                part = (tensor.index_select(0, index) for tensor in (hidden, chosen, weights))
                found = self._by_expert(slot, *part)
            out.index_copy_(0, index, found.to(out.dtype))
        return out

    def _by_expert(
        self, slot: int, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in torch.unique(chosen).tolist():
            token, place = torch.where(chosen == expert)
            x = hidden[token]
            for leaf in LEAVES:
                y = F.linear(x, getattr(self._experts, leaf)[expert])
                pair = self._matrices(leaf, slot)
                if pair is not None:
                    a, b, scale = pair
                    y = y + F.linear(F.linear(x, a[expert]) * scale, b[expert])
                x = self._experts._apply_gate(y) if leaf == GATE_UP else y
            out.index_add_(0, token, (x * weights[token, place, None]).to(out.dtype))
        return out

    def _pair_by_pair(
        self, slot: int, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute every (token, expert) pair separately, so that no result depends on other tokens."""
        top = chosen.shape[1]
        expert = chosen.reshape(-1).long()
        x = hidden.repeat_interleave(top, dim=0).unsqueeze(-1)  # [pairs, in, 1]
        for leaf in LEAVES:
            y = torch.bmm(getattr(self._experts, leaf)[expert], x)
            pair = self._matrices(leaf, slot)
            if pair is not None:
                a, b, scale = pair
                y = y + torch.bmm(b[expert], torch.bmm(a[expert], x) * scale)
            x = y if leaf == DOWN else self._experts._apply_gate(y.squeeze(-1)).unsqueeze(-1)
        out = x.squeeze(-1) * weights.reshape(-1, 1)
        return out.view(len(hidden), top, -1).sum(dim=1)

    def _matrices(
        self, leaf: str, slot: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        slots = self._lora.gate_up if leaf == GATE_UP else self._lora.down
        rank = 0 if slots is None else int(slots.ranks[slot])
        if slots is None or not rank:
            return None
        return slots.a[slot, :, :rank], slots.b[slot, :, :, :rank], slots.scales[slot]
