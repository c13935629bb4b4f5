"""The FSDP2 trainer for any Hugging Face causal LM, sharded over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from slime.backends.backend import HFBucket, ModelName, Offloaded, StepResult, return_unused
from slime.backends.base import first_weights, teacher_weights
from slime.backends.fsdp_utils.checkpoint import Checkpointer, is_checkpoint
from slime.backends.fsdp_utils.expert_parallel import make_expert_groups
from slime.backends.fsdp_utils.hf_export import (
    export_hf,
    hf_buckets,
    own_adapters,
    whole_adapters,
)
from slime.backends.fsdp_utils.loading import (
    ShardedModel,
    build_model,
    finish_loading,
    load_adapter,
    load_hf_weights,
)
from slime.backends.fsdp_utils.lora import adapters_off
from slime.backends.fsdp_utils.optimizer import ShardedOptimizer, muon_names
from slime.backends.lora import LoraTrainRayActor
from slime.backends.optim import step_optimizer
from slime.backends.param_names import Freezing, without_frozen_tower
from slime.config.checks.model_types import in_tower
from slime.core.packing import pack, unpack
from slime.core.types import RolloutBatch, TrainBatch
from slime.runlog.checkpoint_folder import find_checkpoint
from slime.runlog.export_folder import ExportInfo
from slime.utils.device import current_device, device_type
from slime.weights.buckets import NamedTensor
from slime.weights.sync import serving_dtype

if TYPE_CHECKING:
    from slime.config.arguments import Args

_SAVE_MINUTES = 30  # minimum timeout: writing takes longer than a gradient all-reduce


class FSDPTrainRayActor(LoraTrainRayActor):
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
        self.mesh = init_device_mesh(device_type(), (self.world_size,), mesh_dim_names=("dp",))
        self._experts = make_expert_groups(args.expert_model_parallel_size or 1, self.world_size)
        minutes = max(_SAVE_MINUTES, self.args.distributed_timeout_minutes)
        self._checkpointer = Checkpointer(timedelta(minutes=minutes), first_weights(args, "actor"))
        self.model = build_model(
            args, self.mesh, trainable=True, critic=role == "critic", experts=self._experts
        )
        trained = self._trained_names()
        # Engines load the vision tower of --hf-checkpoint: send it if it is trained or came from elsewhere.
        loaded = first_weights(args, role) if checkpoint is None or self.model.lora else checkpoint
        trains_tower = any(in_tower(name) for name in trained)
        self._sends_tower = trains_tower or loaded != args.hf_checkpoint
        for name, param in self.model.params.items():
            param.requires_grad_(name in trained)
        if self.model.lora is None:
            self._fill(self.model, checkpoint or first_weights(args, role))
        else:  # a checkpoint holds adapters only; a critic uses the same base
            self._fill(self.model, first_weights(args, "actor"))
            if args.lora_adapter_path is not None and role == "actor":
                load_adapter(self.model, args.lora_adapter_path)
        matrices = muon_names(self.model.module.hf, self.model.params)
        self.optimizer = ShardedOptimizer(
            args, {n: self.model.params[n] for n in trained}, matrices
        )
        self.frozen: dict[ModelName, ShardedModel] = {}
        if with_ref and self.model.lora is None:
            self.frozen["ref"] = self._load_frozen(first_weights(args, "ref"))
        if with_opd_teacher:
            self.frozen["teacher"] = self._load_frozen(teacher_weights(args))
        torch.manual_seed(args.seed + self.rank)
        return 0 if checkpoint is None else self.load(checkpoint) + 1

    def _trained_names(self) -> list[str]:
        """Return the parameters to train; a critic ignores the flags that freeze some."""
        names = list(self.model.params if self.model.lora is None else self.model.own)
        names = without_frozen_tower(self.args, names)
        return names if self.role == "critic" else Freezing.of(self.args).trained(names)

    def _load_frozen(self, path: str) -> ShardedModel:
        """Load a model for inference; a Hugging Face folder may have a different architecture."""
        own = (Path(path) / "config.json").exists()
        args = self.args.replace(hf_checkpoint=path) if own else self.args
        model = build_model(args, self.mesh, trainable=False, experts=self._experts)
        self._fill(model, path)
        return model

    def _fill(self, model: ShardedModel, path: str) -> None:
        """Load weights from a checkpoint, a folder of checkpoints, or a Hugging Face folder."""
        newest = path if is_checkpoint(path) else find_checkpoint(path)
        if newest is not None:
            self._checkpointer.load_model(str(newest), model)
        else:
            load_hf_weights(model, path)
        finish_loading(model)

    # ---- training

    def pack(self, batch: RolloutBatch, rows: list[int], *, dummy: bool = False) -> TrainBatch:
        """Pack rows sorted by length, so that neighbours can share one padded attention call."""
        rows = sorted(rows, key=lambda row: len(batch.tokens[row]))
        multiple = 1 if self.args.qkv_format == "bshd" else None
        packed = pack(batch, rows, self.parallel, dummy=dummy, equal_multiple=multiple)
        return packed.to(current_device())

    def log_probs(self, batch: RolloutBatch, model: ModelName) -> list[np.ndarray]:
        """Return log-probs; with LoRA the reference model is the base, i.e. the actor without adapters."""
        if model == "ref" and self.model.lora is not None:
            with adapters_off(self.model.module):
                return self._log_probs(batch, self.model)
        return self._log_probs(batch, self.model if model == "actor" else self.frozen[model])

    @torch.no_grad()
    def _log_probs(self, batch: RolloutBatch, sharded: ShardedModel) -> list[np.ndarray]:
        assert batch.schedule is not None
        columns = [np.zeros(length, np.float32) for length in batch.response_lens]
        for number, rows in enumerate(batch.schedule.log_prob_micro_batches):
            dummy = (-1, number) in batch.schedule.dummies
            micro_batch = self.pack(batch, rows, dummy=dummy)
            values, _ = sharded.module(micro_batch)
            if not dummy:
                for row, column in zip(micro_batch.rows, unpack(values, micro_batch), strict=True):
                    columns[row] = column
        sharded.reshard()
        return columns

    def train_step(
        self, rollout_id: int, step_id: int, micro_batches: list[TrainBatch]
    ) -> StepResult:
        result = self.forward_backward(micro_batches)
        return step_optimizer(self.optimizer, result, rollout_id, step_id)

    def forward_backward(self, micro_batches: list[TrainBatch]) -> StepResult:
        """Accumulate the gradient of the step, reduced over all ranks, in the parameters."""
        result = StepResult()
        for number, micro_batch in enumerate(micro_batches):
            if self.world_size == 1 and self.model.lora is None:
                # One rank: keep parameters unsharded and accumulate locally until the last one.
                last = number + 1 == len(micro_batches)
                root = self.model.root
                root.set_requires_gradient_sync(last)
                root.set_reshard_after_backward(last)
            loss = self._forward(micro_batch, result)
            # FSDP averages gradients over ranks, but the loss is a sum over ranks.
            (loss * self.parallel.dp_size).backward()
        return result

    def _forward(self, batch: TrainBatch, result: StepResult) -> torch.Tensor:
        if self.uses_logits:
            logits, _ = self.model.module(batch, output="logits")
            return self.custom_loss(batch, logits, result)
        log_probs, entropy = self.model.module(batch, with_entropy=True)
        return self.loss(batch, log_probs, entropy, result)

    @torch.no_grad()
    def update_ref(self) -> None:
        ref = self.frozen["ref"]
        for name, param in self.model.params.items():
            ref.params[name].to_local().copy_(param.to_local())

    # ---- checkpoints and weights

    def save_to(self, path: str, rollout_id: int, force_sync: bool = False) -> None:
        self._checkpointer.save(
            path,
            rollout_id,
            self.model,
            self.optimizer,
            ref=self.frozen["ref"] if self._ref_is_updated else None,
            with_optimizer=not self.args.no_save_optim,
            in_background=self.args.async_save and not force_sync,
        )

    def wait_write(self) -> None:
        self._checkpointer.wait()

    def load(self, path: str) -> int:
        facts = self._checkpointer.load_model(path, self.model, adapters=True)
        with_moments = not self.args.no_load_optim
        self._checkpointer.load_optimizer(path, self.optimizer, moments=with_moments)
        if self._ref_is_updated and facts.has_ref:
            self._checkpointer.load_ref(path, self.frozen["ref"])
        return facts.rollout_id

    @property
    def _ref_is_updated(self) -> bool:
        return "ref" in self.frozen and bool(self.args.ref_update_interval)

    def whole_adapters(self, dtype: torch.dtype) -> Iterator[NamedTensor]:
        return whole_adapters(self.model, dtype)

    def sent_adapters(self, dtype: torch.dtype) -> Iterator[NamedTensor]:
        if self.model.is_whole:  # the cast writes into the buffer that is sent
            return own_adapters(self.model)
        return self.whole_adapters(dtype)

    def base_buckets(self) -> Iterator[HFBucket]:
        return self.hf_buckets(merged=False)

    def hf_buckets(self, *, merged: bool = True) -> Iterator[HFBucket]:
        # The tensor transport sends from every rank to engines on its device, others from rank 0.
        keep = self.rank == 0 or self.args.update_weight_transport == "tensor"
        size = self.args.update_weight_buffer_size
        dtype = serving_dtype(self.args)
        tower = self._sends_tower
        return hf_buckets(self.model, dtype, size, keep=keep, merged=merged, tower=tower)

    def export_hf(self, path: str, info: ExportInfo | None = None) -> None:
        if self.model.lora is not None:
            self.export_adapter(path, self.model.lora, info)
            return
        export_hf(self.model, path, self.args.hf_checkpoint, serving_dtype(self.args), info)

    def drop_gradients(self) -> None:
        self.optimizer.drop_grads()
        return_unused()

    def sleep(self) -> None:
        """Offload parameters and optimizer state to host memory; CPU tensors stay in place."""
        if self._offloaded is None:
            self.drop_gradients()
            for model in (self.model, *self.frozen.values()):
                model.module.features.clear()
            self._offloaded = Offloaded(self._resident())

    def _resident(self) -> Iterator[torch.Tensor]:
        for model in (self.model, *self.frozen.values()):
            for param in model.params.values():
                yield param.to_local().detach()
        yield from self.optimizer.storages()
