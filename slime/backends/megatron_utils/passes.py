"""Forward and backward passes of packed micro-batches through megatron's pipeline schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.attention import PackedRows, packed_rows
from slime.backends.megatron_utils.parallel import unwrapped
from slime.backends.megatron_utils.rope import has_packed_rotary
from slime.backends.megatron_utils.vision import add_images
from slime.core.types import ParallelInfo, TrainBatch
from slime.utils.device import current_device

Read = Callable[[Any, torch.Tensor, TrainBatch], torch.Tensor]  # (chunk, hidden, batch)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    batch: TrainBatch
    tokens: torch.Tensor  # [1, T'] packed, [B, S] padded
    position_ids: torch.Tensor
    rows: PackedRows | None  # None if padded
    ahead: torch.Tensor | None = None  # [MTP layers, *tokens.shape], the tokens 1, 2, ... ahead


class Passes:
    """Run micro-batches through this rank's model chunks, together with other pipeline ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        parallel: ParallelInfo,
        *,
        padded: bool,
        multiple: int | None = None,
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._padded = padded  # --qkv-format bshd
        self._multiple = multiple  # --data-pad-size-multiplier
        self._angles_by_token = has_packed_rotary(config)
        self._virtual = config.virtual_pipeline_model_parallel_size is not None
        # The all-gather dispatcher of MoE needs the same number of tokens on every rank.
        self._gathers = bool(config.num_moe_experts) and (
            config.moe_token_dispatcher_type == "allgather"
        )

    def train(self, chunks: list[Any], batches: list[TrainBatch], loss: Read) -> None:
        """Add the gradient of the sum of `loss(chunk, hidden, batch)` to the chunks' buffers."""

        def step(inputs: Iterator[Inputs], chunk: Any) -> tuple[torch.Tensor, Any]:
            current = next(inputs)

            def reduce(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                return loss(chunk, hidden, current.batch), torch.tensor(1, dtype=torch.int), {}

            return _forward(chunk, current, current.ahead), reduce

        self._run(step, chunks, batches, forward_only=False)

    @torch.no_grad()
    def collect(
        self,
        chunks: list[Any],
        batches: list[TrainBatch],
        read: Read,
        experts: list[PackedRows] | None = None,
    ) -> list[torch.Tensor]:
        """Return `read(chunk, hidden, batch)` per micro-batch on the last stage, [] on other stages.

        The rows of each micro-batch, which record the experts chosen, are appended to `experts`.
        """

        def step(inputs: Iterator[Inputs], chunk: Any) -> tuple[torch.Tensor, Any]:
            current = next(inputs)
            if experts is not None and current.rows is not None and current.rows.recorded is None:
                current.rows.recorded = {}
                experts.append(current.rows)
            return _forward(chunk, current), lambda hidden, **_: read(chunk, hidden, current.batch)

        outputs = self._run(step, chunks, batches, forward_only=True)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return outputs[: len(batches)] if is_last else []

    def _run(
        self,
        step: Callable[..., Any],
        chunks: list[Any],
        batches: list[TrainBatch],
        *,
        forward_only: bool,
    ) -> list[Any]:
        inputs = self._inputs(batches)
        count, length = inputs[0].tokens.shape
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(inputs) for _ in chunks] if self._virtual else iter(inputs),
            model=chunks if self._virtual else chunks[0],
            num_microbatches=len(inputs),
            seq_length=length * self._parallel.cp_size,
            micro_batch_size=count,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _inputs(self, batches: list[TrainBatch]) -> list[Inputs]:
        if self._virtual:  # the interleaved schedule needs a multiple of PP micro-batches
            missing = -len(batches) % self._parallel.pp_size
            batches = batches + [batches[-1].as_dummy()] * missing
        if self._padded:
            return [self._padded_inputs(batch) for batch in batches]
        lens = [self._round_up(len(batch.tokens)) for batch in batches]
        if self._gathers:
            longest = torch.tensor(max(lens), device=current_device())
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            lens = [int(longest)] * len(lens)
        elif self._virtual:  # overlapped p2p supports one shape only
            lens = [max(lens)] * len(lens)
        return [
            self._packed_inputs(batch, length) for batch, length in zip(batches, lens, strict=True)
        ]

    def _packed_inputs(self, batch: TrainBatch, length: int) -> Inputs:
        """Return the packed inputs, padded to `length` tokens by a dummy sample."""
        cp, extra = self._parallel.cp_size, length - len(batch.tokens)
        lens = (batch.cu_seqlens.diff() * cp).tolist() + ([extra * cp] if extra else [])
        rows = packed_rows(lens, self._parallel, batch.tokens.device)
        position_ids = F.pad(batch.position_ids, (0, extra))
        rows.position_ids = position_ids
        if batch.mrope_positions is not None:
            rows.position_ids = F.pad(batch.mrope_positions, (0, 0, 0, extra))
        if self._angles_by_token:
            # None is the default of megatron-core's fields, whatever their annotation.
            rows.cu_seqlens_q = rows.cu_seqlens_kv = None  # pyright: ignore[reportAttributeAccessIssue]
        if batch.routed_experts is not None:
            rows.routed_experts = F.pad(batch.routed_experts, (0, 0, 0, 0, 0, extra), value=-1)
        tokens = F.pad(batch.tokens, (0, extra)).unsqueeze(0)
        ahead = _tokens_ahead(batch)
        return Inputs(
            batch=batch,
            tokens=tokens,
            position_ids=position_ids.unsqueeze(0),
            rows=rows,
            ahead=None if ahead is None else F.pad(ahead, (0, extra)).unsqueeze(1),
        )

    def _padded_inputs(self, batch: TrainBatch) -> Inputs:
        shape = (len(batch.rows), -1)  # all rows are padded to the same length
        tokens, position_ids = batch.tokens.view(shape), batch.position_ids.view(shape)
        ahead = _tokens_ahead(batch)
        if ahead is not None:
            ahead = ahead.view(len(ahead), *tokens.shape)
        return Inputs(batch=batch, tokens=tokens, position_ids=position_ids, rows=None, ahead=ahead)

    def _round_up(self, length: int) -> int:
        """Round up so that sequence shards are equal and fit the tiles of FP8 matmuls."""
        unit = self._parallel.tp_size if self._config.sequence_parallel else 1
        unit *= fp8_multiple(self._config)
        if self._multiple is not None:
            unit = math.lcm(unit, self._multiple * self._parallel.tp_size)
        if self._parallel.cp_size > 1:
            unit = math.lcm(unit, 2)
        return -(-length // unit) * unit


def _forward(chunk: Any, inputs: Inputs, ahead: torch.Tensor | None = None) -> torch.Tensor:
    """Return the hidden states; with `ahead` those of multi-token-prediction layers after them."""
    further = {} if ahead is None else {"labels": ahead}
    if inputs.rows is not None and inputs.batch.pixel_values is not None:
        add_images(unwrapped(chunk), inputs.batch, inputs.rows, inputs.tokens.shape[1])
    return chunk(
        input_ids=inputs.tokens,
        position_ids=inputs.position_ids,
        attention_mask=None,
        packed_seq_params=inputs.rows,
        **further,
    )


def _tokens_ahead(batch: TrainBatch) -> torch.Tensor | None:
    if batch.mtp_labels is None:
        return None
    return torch.cat([batch.labels.unsqueeze(0), batch.mtp_labels[:-1]])


def fp8_multiple(config: TransformerConfig) -> int:
    """Return the multiple to pad a rank's tokens to: the block of FP8 scales, or of its GEMM."""
    if not config.fp8:
        return 1
    return {"blockwise": 128, "mxfp8": 32}.get(config.fp8_recipe or "", 16)


def prepare_config(config: TransformerConfig) -> None:
    """Configure losses and gradients as sums, and p2p for micro-batches of varying length."""
    config.calculate_per_token_loss = True  # Megatron's, whatever --calculate-per-token-loss is
    config.finalize_model_grads_func = _sum_gradients
    if config.pipeline_model_parallel_size > 1:
        virtual = config.virtual_pipeline_model_parallel_size is not None
        gathers = config.num_moe_experts and config.moe_token_dispatcher_type == "allgather"
        config.variable_seq_lengths = not virtual and not gathers
        config.deallocate_pipeline_outputs = False
        # Batched p2p over gloo gives wrong gradients with virtual pipeline stages.
        config.batch_p2p_comm, config.overlap_p2p_comm = not virtual, virtual


def _sum_gradients(chunks: list[Any], num_tokens: torch.Tensor | None = None, **more: Any) -> None:
    """Sum gradients without dividing by a token count, as losses are already weighted."""
    finalize_model_grads(chunks, None, **more)
