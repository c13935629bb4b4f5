"""The Megatron trainer: tensor, pipeline, context, expert and data parallel, on real megatron-core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from slime.backends.base import StepResult, TrainRayActor
from slime.backends.lr import lr_schedule
from slime.backends.megatron_utils.cpu import install_cpu_adapter
from slime.utils.device import current_device
from slime.utils.packing import join_slices, pack, unpack
from slime.utils.types import MetricSum, RolloutBatch, TrainBatch

install_cpu_adapter()

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron_utils.model import Head, build_chunks, wrap_chunks  # noqa: E402
from slime.backends.megatron_utils.model_config import (  # noqa: E402
    gpt_options,
    model_config,
    read_config,
    virtual_stages,
)
from slime.backends.megatron_utils.optimizer import MegatronAdamW  # noqa: E402
from slime.backends.megatron_utils.parallel import init_parallel  # noqa: E402
from slime.backends.megatron_utils.passes import Passes, prepare_config  # noqa: E402

if TYPE_CHECKING:
    from slime.utils.arguments import Args


class MegatronTrainRayActor(TrainRayActor):
    def init(
        self,
        args: Args | None = None,
        role: str = "actor",
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        checkpoint: str | None = None,
    ) -> int:
        super().init(args, role, with_ref, with_opd_teacher)
        args = self.args
        hf_config = read_config(args.hf_checkpoint)
        self.parallel = init_parallel(args, virtual_stages(args, hf_config.num_hidden_layers))
        self.config = model_config(hf_config, args)
        options = gpt_options(hf_config, args)
        padded = args.qkv_format == "bshd"
        prepare_config(self.config)
        self.passes = Passes(self.config, self.parallel, padded=padded)
        self.head = Head(
            vocab_size=options.true_vocab_size,
            temperature=args.rollout_temperature,
            chunk_size=args.log_probs_chunk_size,
        )
        self.chunks = build_chunks(args, self.config, options, critic=role == "critic")
        self.model = wrap_chunks(args, self.config, self.chunks)
        self.optimizer = MegatronAdamW(args, self.model, lr_schedule(args))
        return 0

    # ---- training

    def pack(self, batch: RolloutBatch, rows: list[int], *, filler: bool = False) -> TrainBatch:
        rows = sorted(rows, key=lambda row: len(batch.tokens[row]))
        multiple = None
        if self.args.qkv_format == "bshd":
            multiple = self.parallel.tp_size if self.config.sequence_parallel else 1
        packed = pack(batch, rows, self.parallel, filler=filler, equal_multiple=multiple)
        return packed.to(current_device())

    def unpack(self, column: torch.Tensor, batch: TrainBatch) -> list[np.ndarray]:
        if self.cp_group is None:
            return unpack(column, batch)
        slices = [torch.empty_like(column) for _ in range(self.parallel.cp_size)]
        dist.all_gather(slices, column.detach().contiguous(), group=self.cp_group)
        return unpack(join_slices(slices, batch), batch, cp_size=self.parallel.cp_size)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        group = parallel_state.get_data_parallel_group()
        return group if group.size() > 1 else None

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        group = parallel_state.get_context_parallel_group()
        return group if group.size() > 1 else None

    def log_probs(self, batch: RolloutBatch, model: Literal["actor", "ref"]) -> list[np.ndarray]:
        assert batch.schedule is not None
        fillers = batch.schedule.fillers
        micro_batches = [
            self.pack(batch, rows, filler=(-1, number) in fillers)
            for number, rows in enumerate(batch.schedule.log_prob_micro_batches)
        ]
        outputs = self.passes.collect(self.model, micro_batches, self._read)
        columns = [np.zeros(length, np.float32) for length in batch.response_lens]
        for micro_batch, values in zip(micro_batches, outputs, strict=False):
            unpacked = self.unpack(values, micro_batch)
            if not micro_batch.filler:
                for row, column in zip(micro_batch.rows, unpacked, strict=True):
                    columns[row] = column
        return self._from_last_stage(columns)

    def train_step(
        self, rollout_id: int, step_id: int, micro_batches: list[TrainBatch]
    ) -> StepResult:
        result = self.forward_backward(micro_batches)
        lr = self.optimizer.lr
        grad_norm = self.optimizer.step()
        self.require_finite(grad_norm, rollout_id, step_id, result)
        result.add(
            {"grad_norm": MetricSum(total=grad_norm, count=1), "lr": MetricSum(total=lr, count=1)}
        )
        return result

    def forward_backward(self, micro_batches: list[TrainBatch]) -> StepResult:
        """Leave the gradient of the whole step, of all ranks, in the gradient buffers."""
        result = StepResult()

        def loss(chunk: Any, hidden: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
            if self.args.loss_type == "custom_loss":
                logits = self.head.logits(_module(chunk), hidden, batch)
                return self.custom_loss(batch, logits, result)
            values, entropy = self.head.log_probs(
                _module(chunk), hidden, batch, with_entropy=self.role == "actor"
            )
            return self.loss(batch, values, entropy, result)

        self.optimizer.zero_grad()
        self.passes.train(self.model, micro_batches, loss)
        return result

    def _read(self, chunk: Any, hidden: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        return self.head.log_probs(_module(chunk), hidden, batch, with_entropy=False)[0]

    def _from_last_stage(self, columns: list[np.ndarray]) -> list[np.ndarray]:
        """Every pipeline rank needs what only the last one has computed."""
        if self.parallel.pp_size == 1:
            return columns
        flat = torch.from_numpy(np.concatenate(columns)).to(current_device())
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        ends = np.cumsum([len(column) for column in columns])
        return np.split(flat.cpu().numpy(), ends[:-1])


def _module(chunk: Any) -> Any:
    """The model inside its data-parallel wrapper."""
    return getattr(chunk, "module", chunk)
