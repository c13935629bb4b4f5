"""Gated delta nets in plain torch: convolution and delta rule continue from the states of the rows.

The tokens of a forward are grouped by how they can be computed together::

    one token per row                    all at once, token by token of each row
    prefill chunks of several tokens     packed, by the chunked scan of gated_delta.py

In deterministic mode every token takes the first way: a chunked scan rounds differently for each division of a
prompt into chunks. Rounds then hold at most one token of each row and always have the same size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from slime.algorithms.delta_layers import (
    DeltaInputs,
    continue_sequences,
    continue_tokens,
    conv_weight,
    find_delta_nets,
    finish,
    heads_of,
    project,
)
from slime.algorithms.gated_delta import DeltaHeads
from slime.engine.kv_cache import StateCache, StateShape
from slime.engine.models.attention import current_plan
from slime.engine.scheduler.step import StepBatch


@dataclass(kw_only=True, eq=False)
class StatePlan:
    """Assigns the tokens of a forward to the rows that they continue; the same for all layers."""

    states: StateCache
    rounds: list[tuple[torch.Tensor, torch.Tensor]]  # tokens, and the row of each
    packed: tuple[torch.Tensor, torch.Tensor, tuple[int, ...]] | None  # tokens, rows and lengths
    fixed: bool  # rounds are padded with the index after the last token

    def run(
        self, layer: int, inputs: DeltaInputs, weight: torch.Tensor, heads: DeltaHeads
    ) -> torch.Tensor:
        """Return the delta rule's output [T, value heads, value dim]; the rows then hold the new states."""
        count = len(inputs.beta)
        if self.fixed:
            inputs = inputs.map(lambda x: F.pad(x, (0, 0, 0, 1)))
        # Zeros for padding tokens, which no round computes: a NaN would reach the padding page.
        out = inputs.mixed_qkv.new_zeros(len(inputs.beta), heads.num_value, heads.value_dim)
        if self.packed is not None:
            tokens, rows, lens = self.packed
            state = self.states.read(layer, rows)
            part = inputs.map(lambda x: x.index_select(0, tokens))
            out[tokens], state = continue_sequences(part, weight, heads, lens, state)
            self.states.write(layer, rows, state)
        for tokens, rows in self.rounds:
            state = self.states.read(layer, rows)
            part = inputs.map(lambda x, tokens=tokens: x.index_select(0, tokens))
            out[tokens], state = continue_tokens(part, weight, heads, state)
            self.states.write(layer, rows, state)
        return out[:count]


def plan_states(
    batch: StepBatch, states: StateCache, padding_row: int, *, fixed: bool
) -> StatePlan:
    """Cut the tokens of a forward into rounds and packed sequences; `fixed` is deterministic mode."""

    def send(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(states.device)

    if fixed:
        rounds = [(send(t), send(r)) for t, r in _fixed_rounds(batch.rows, padding_row)]
        return StatePlan(states=states, rounds=rounds, packed=None, fixed=True)
    counts = np.array(batch.counts, np.int64)
    starts = np.cumsum(counts) - counts
    single = starts[counts == 1]
    rounds = [(send(single), send(batch.rows[single]))] if len(single) else []
    packed = None
    if (counts > 1).any():
        tokens = np.flatnonzero(np.repeat(counts > 1, counts))
        lens = tuple(counts[counts > 1].tolist())
        packed = send(tokens), send(batch.rows[starts[counts > 1]]), lens
    return StatePlan(states=states, rounds=rounds, packed=packed, fixed=False)


def _fixed_rounds(rows: np.ndarray, padding_row: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return tokens and rows of each round: the n-th tokens of all rows, filled up with padding."""
    rounds: list[tuple[np.ndarray, np.ndarray]] = []
    seen: dict[int, int] = {}
    for token, row in enumerate(rows.tolist()):
        if row == padding_row:
            continue
        number = seen.get(row, 0)
        seen[row] = number + 1
        if number == len(rounds):
            rounds.append((np.full_like(rows, len(rows)), np.full_like(rows, padding_row)))
        tokens, of = rounds[number]
        tokens[token], of[token] = token, row
    return rounds


def serve_delta_nets(model: PreTrainedModel) -> None:
    """Make the gated delta nets of a model use the states of the engine.

    Outside of the engine's forwards they are unchanged: the check at startup compares with that.
    """
    for net in find_delta_nets(model):
        net.forward = functools.partial(_continue_states, net, net.forward)


def state_shape(model: PreTrainedModel) -> StateShape | None:
    """Return what the gated delta nets of a model store per request; None if it has none."""
    nets = find_delta_nets(model)
    if not nets:
        return None
    return StateShape(
        layers=tuple(net.layer_idx for net in nets),
        heads=heads_of(nets[0]),
        window=nets[0].conv_kernel_size - 1,
    )


def _continue_states(
    net: Any, original: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    plan = current_plan()
    if plan is None:
        return original(hidden_states, *args, **kwargs)
    assert plan.states is not None, "the engine has no states for this model"
    inputs, z = project(net, hidden_states)
    out = plan.states.run(net.layer_idx, inputs, conv_weight(net), heads_of(net))
    return finish(net, out, z).unsqueeze(0)
