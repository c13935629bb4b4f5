"""A Megatron model of this rank, as the trainer builds it, without and with an optimizer.

To be imported inside rank processes: it makes the CPU stand for the GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.backends.megatron_utils.cpu import install_cpu_adapter
from slime.backends.optim import lr_schedule

install_cpu_adapter()

from slime.backends.megatron_utils.hf_weights.export import export_hf  # noqa: E402
from slime.backends.megatron_utils.hf_weights.families import weight_map  # noqa: E402
from slime.backends.megatron_utils.hf_weights.local_weights import load_hf  # noqa: E402
from slime.backends.megatron_utils.hf_weights.reader import HfReader  # noqa: E402
from slime.backends.megatron_utils.model import Head, build_chunks, wrap_chunks  # noqa: E402
from slime.backends.megatron_utils.model_config import (  # noqa: E402
    model_config,
    read_config,
    virtual_stages,
)
from slime.backends.megatron_utils.optimizer import ScheduledOptimizer  # noqa: E402
from slime.backends.megatron_utils.parallel import init_parallel  # noqa: E402
from slime.backends.megatron_utils.passes import Passes, prepare_config  # noqa: E402
from slime.config.arguments import Args  # noqa: E402
from slime.core.packing import pack  # noqa: E402
from slime.core.types import ParallelInfo, RolloutBatch, TrainBatch  # noqa: E402
from slime.utils.device import current_device  # noqa: E402


class MegatronModel:
    def __init__(self, args: Args) -> None:
        hf_config = read_config(args.hf_checkpoint)
        self.parallel = init_parallel(args, virtual_stages(args, hf_config.num_hidden_layers))
        self.config = model_config(hf_config, args)
        prepare_config(self.config)
        self.weights = weight_map(hf_config, args)
        self.passes = Passes(self.config, self.parallel, padded=False)
        self.head = Head(vocab_size=hf_config.vocab_size, temperature=1.0, chunk_size=1024)
        self.chunks = build_chunks(args, self.config, hf_config)

    def load(self, folder: Path) -> None:
        load_hf(self.chunks, self.weights, HfReader(folder))

    def logits(self, rows: list[np.ndarray]) -> torch.Tensor | None:
        """[T, V] of all rows end to end; None where this rank is not of the last stage."""
        outputs = self.passes.collect(self.chunks, [packed(rows, self.parallel)], self.head.logits)
        return outputs[0] if outputs else None

    def exported(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in export_hf(self.chunks, self.weights)}


class MegatronTrainer(MegatronModel):
    """With an optimizer, and a loss that needs no rollout: the negative log-probs of the next tokens."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.model = wrap_chunks(args, self.config, self.chunks)
        self.optimizer = ScheduledOptimizer(args, self.model, lr_schedule(args))

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.optimizer.inner.reload_model_params()

    def train(self, rows: list[np.ndarray]) -> None:
        """One step. The gradient is clipped to norm 1, so ranks that repeat it change nothing."""
        self.optimizer.zero_grad()
        self.passes.train(self.model, [packed(rows, self.parallel)], self._loss)
        norm = self.optimizer.step()
        assert norm > 1.0

    def gradients(self, rows: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """By Hugging Face name; maps are linear, so gradients go through them as weights do.

        Overwrites the weights. Data-parallel ranks that all have `rows` add up, which is undone.
        """
        self.optimizer.zero_grad()
        self.passes.train(self.model, [packed(rows, self.parallel)], self._loss)
        for chunk in self.chunks:
            for param in chunk.parameters():
                param.data.copy_(param.main_grad / self.parallel.dp_size)
        return self.exported()

    def _loss(self, chunk: Any, hidden: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        log_probs, _ = self.head.log_probs(
            getattr(chunk, "module", chunk), hidden, batch, with_entropy=False
        )
        return -log_probs.sum()


def packed(rows: list[np.ndarray], parallel: ParallelInfo) -> TrainBatch:
    """This rank's part of a micro-batch in which every token but a row's last predicts the next."""
    lens = [len(row) - 1 for row in rows]
    ones = [np.ones(length) for length in lens]
    number = np.arange(len(rows))
    batch = RolloutBatch(
        tokens=rows,
        response_lens=np.array(lens),
        loss_masks=ones,
        loss_weights=ones,
        rewards=np.zeros(len(rows)),
        raw_rewards=np.zeros(len(rows)),
        truncated=np.zeros(len(rows)),
        group_indices=number,
        sample_indices=number,
        trajectory_ids=number,
    )
    return pack(batch, number.tolist(), parallel).to(current_device())
