"""The Megatron trainer: tensor, pipeline, context, expert and data parallelism by megatron-core."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slime.backends.backend import HFBucket, ModelName, Offloaded, StepResult, return_unused
from slime.backends.base import first_weights, teacher_weights
from slime.backends.lora import LoraTrainRayActor
from slime.backends.megatron_utils.cpu import install_cpu_adapter
from slime.backends.optim import lr_schedule, step_optimizer
from slime.config import hook_types
from slime.config.flags.spec import option_of
from slime.core.packing import join_slices, pack, unpack
from slime.core.types import RolloutBatch, TrainBatch
from slime.runlog.checkpoint_folder import find_checkpoint, read_meta
from slime.runlog.export_folder import ExportInfo
from slime.utils.device import current_device
from slime.utils.load_function import load_hook
from slime.weights.buckets import NamedTensor, batches
from slime.weights.hf_folder import FILE_BYTES, write_hf_folder
from slime.weights.sync import serving_dtype

install_cpu_adapter()

from megatron.core import parallel_state  # noqa: E402

from slime.backends.megatron_utils.attention import PackedRows  # noqa: E402
from slime.backends.megatron_utils.checkpoint import Checkpointer, is_checkpoint  # noqa: E402
from slime.backends.megatron_utils.hf_weights.export import (  # noqa: E402
    export_hf,
    hf_buckets,
    with_copies,
)
from slime.backends.megatron_utils.hf_weights.families import weight_map  # noqa: E402
from slime.backends.megatron_utils.hf_weights.local_weights import load_hf  # noqa: E402
from slime.backends.megatron_utils.hf_weights.reader import HfReader  # noqa: E402
from slime.backends.megatron_utils.layers import layers_line  # noqa: E402
from slime.backends.megatron_utils.lora import add_adapters  # noqa: E402
from slime.backends.megatron_utils.model import (  # noqa: E402
    Head,
    HostWeights,
    build_chunks,
    drop_fp8_copies,
    freeze,
    resident_tensors,
    wrap_chunks,
)
from slime.backends.megatron_utils.model_config import (  # noqa: E402
    model_config,
    read_config,
    trained_mtp_layers,
    virtual_stages,
)
from slime.backends.megatron_utils.optimizer import ScheduledOptimizer  # noqa: E402
from slime.backends.megatron_utils.parallel import (  # noqa: E402
    all_gather,
    context_group,
    data_group,
    init_parallel,
    pipeline_group,
    unwrapped,
)
from slime.backends.megatron_utils.passes import (  # noqa: E402
    Passes,
    fp8_multiple,
    prepare_config,
)
from slime.backends.megatron_utils.routing_replay import (  # noqa: E402
    install_replay,
    keep_experts,
)

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from slime.config.arguments import Args

logger = logging.getLogger(__name__)
_REF = "ref"  # subfolder of a checkpoint with the reference that --ref-update-interval updates


class MegatronTrainRayActor(LoraTrainRayActor):
    def init(
        self,
        args: Args | None = None,
        role: str = "actor",
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        checkpoint: str | None = None,
    ) -> int:
        super().init(args, role, with_ref, with_opd_teacher)
        if role == "critic":  # it has no output layer that could predict tokens
            self.args = self.args.replace(enable_mtp_training=False)
        args = self.args
        hf_config = read_config(args.hf_checkpoint)
        self.parallel = init_parallel(args, virtual_stages(args, hf_config.num_hidden_layers))
        self.config = model_config(hf_config, args)
        padded = args.qkv_format == "bshd"
        prepare_config(self.config)
        if self.rank == 0 and role == "actor":
            logger.info("layers: %s", layers_line(self.config))
        multiple = args.data_pad_size_multiplier
        self.passes = Passes(self.config, self.parallel, padded=padded, multiple=multiple)
        self.head = Head(
            vocab_size=hf_config.vocab_size,
            temperature=args.rollout_temperature,
            chunk_size=args.log_probs_chunk_size,
        )
        self._weights = weight_map(hf_config, args)
        self.chunks = build_chunks(args, self.config, hf_config, critic=role == "critic")
        if role == "actor":  # the freeze flags apply to the actor only
            freeze(args, self.chunks, self._weights)
        self.adapters = add_adapters(args, self.chunks, self._weights)
        base = first_weights(args, "actor")
        self._checkpointer = Checkpointer(hf_config.model_type, self.adapters, base)
        if args.use_routing_replay or args.use_rollout_routing_replay:
            install_replay(self.chunks)
        self.model = wrap_chunks(args, self.config, self.chunks)
        self.frozen: dict[ModelName, HostWeights] = {}
        if with_ref and self.adapters is None:
            self._fill(first_weights(args, "ref"))
            self.frozen["ref"] = HostWeights(self.chunks)
        if with_opd_teacher:
            assert args.opd_teacher_load is not None, "a teacher is requested only with a path"
            self._fill(teacher_weights(args))
            self.frozen["teacher"] = HostWeights(self.chunks)
        if self.adapters is None:
            self._fill(checkpoint or self._released() or first_weights(args, role))
        else:  # a checkpoint holds adapters only; a critic uses the same base
            self._fill(base)
            self.adapters.start(args, role)
        self.optimizer = ScheduledOptimizer(args, self.model, lr_schedule(args))
        self._hook("custom_megatron_init_path", hook_types.MegatronInit, args)
        start = 0 if checkpoint is None else self.load(checkpoint) + 1
        if args.offload_train:
            self.drop_gradients()
        return start

    def _released(self) -> str | None:
        """Return the checkpoint of --load if it is a converted model and not a run to resume."""
        found = find_checkpoint(self.args.load, self.args.ckpt_step)
        released = found is not None and self.role == "actor" and read_meta(found).release
        return str(found) if released else None

    def _fill(self, path: str) -> None:
        """Load weights from a checkpoint, the newest one in a folder, or a Hugging Face folder."""
        newest = path if is_checkpoint(path) else find_checkpoint(path)
        if newest is None:
            load_hf(self.chunks, self._weights, HfReader(path))
            return
        if trained_mtp_layers(self.args):  # which the checkpoint may lack
            load_hf(self.chunks, self._weights, HfReader(self.args.hf_checkpoint), only_mtp=True)
        self._checkpointer.load_model(str(newest), self.chunks)

    # ---- training

    def pack(self, batch: RolloutBatch, rows: list[int], *, dummy: bool = False) -> TrainBatch:
        rows = sorted(rows, key=lambda row: len(batch.tokens[row]))
        multiple = None
        if self.args.qkv_format == "bshd":
            multiple = self.parallel.tp_size if self.config.sequence_parallel else 1
            multiple *= fp8_multiple(self.config)
        packed = pack(
            batch,
            rows,
            self.parallel,
            dummy=dummy,
            equal_multiple=multiple,
            mtp_layers=trained_mtp_layers(self.args),
        )
        return packed.to(current_device())

    def unpack(self, column: torch.Tensor, batch: TrainBatch) -> list[np.ndarray]:
        slices = all_gather(column.detach(), context_group())
        return unpack(join_slices(slices, batch), batch, cp_size=self.parallel.cp_size)

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        group = data_group()
        return group if group.size() > 1 else None

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        group = context_group()
        return group if group.size() > 1 else None

    def log_probs(self, batch: RolloutBatch, model: ModelName) -> list[np.ndarray]:
        assert batch.schedule is not None
        dummies = batch.schedule.dummies
        micro_batches = [
            self.pack(batch, rows, dummy=(-1, number) in dummies)
            for number, rows in enumerate(batch.schedule.log_prob_micro_batches)
        ]
        self._hook(
            "custom_megatron_before_log_prob_hook_path",
            hook_types.BeforeLogProbHook,
            self.args,
            self.model,
            "" if model == "actor" else f"{model}_",
        )
        records = self.args.use_routing_replay and model == "actor" and self.role == "actor"
        seen: list[PackedRows] | None = [] if records else None
        if model != "actor":  # a frozen model routes by its own routers
            micro_batches = [replace(batch, routed_experts=None) for batch in micro_batches]
        with self._weights_of(model):
            outputs = self.passes.collect(self.model, micro_batches, self._read, seen)
        if seen is not None:
            keep_experts(batch, micro_batches, seen, self.config.num_layers)
        columns = [np.zeros(length, np.float32) for length in batch.response_lens]
        for micro_batch, values in zip(micro_batches, outputs, strict=False):
            unpacked = self.unpack(values, micro_batch)
            if not micro_batch.dummy:
                for row, column in zip(micro_batch.rows, unpacked, strict=True):
                    columns[row] = column
        return self._from_last_stage(columns)

    @contextmanager
    def _weights_of(self, model: ModelName, *, trained: bool = False) -> Iterator[None]:
        """Swap in a frozen model; with LoRA the reference is the base: the actor without adapters."""
        with ExitStack() as stack:
            if self.adapters is not None:
                stack.enter_context(self.adapters.passes(on=model == "actor", trained=trained))
            if model in self.frozen:
                stack.enter_context(self.frozen[model].swapped_in())
            yield

    def train_step(
        self, rollout_id: int, step_id: int, micro_batches: list[TrainBatch]
    ) -> StepResult:
        self.optimizer.hold_grads()
        self._hook(
            "custom_megatron_before_train_step_hook_path",
            hook_types.BeforeTrainStepHook,
            self.args,
            rollout_id,
            step_id,
            self.model,
            self.optimizer.inner,
            self.optimizer.schedule,
        )
        result = self.forward_backward(micro_batches)
        return step_optimizer(self.optimizer, result, rollout_id, step_id)

    def forward_backward(self, micro_batches: list[TrainBatch]) -> StepResult:
        """Accumulate the gradient of the step, summed over all ranks, in the gradient buffers."""
        result = StepResult()

        def loss(chunk: Any, hidden: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
            model = unwrapped(chunk)
            hidden, *further = hidden.chunk(1 + trained_mtp_layers(self.args))
            ahead = self._mtp_loss(model, further, batch, result) if further else 0.0
            if self.uses_logits:
                logits = self.head.logits(model, hidden, batch)
                return self.custom_loss(batch, logits, result) + ahead
            values, entropy = self.head.log_probs(
                model, hidden, batch, with_entropy=self.role == "actor"
            )
            return self.loss(batch, values, entropy, result) + ahead

        self.optimizer.zero_grad()
        with self._weights_of("actor", trained=True):
            self.passes.train(self.model, micro_batches, loss)
        return result

    def _mtp_loss(
        self, chunk: GPTModel, states: list[torch.Tensor], batch: TrainBatch, result: StepResult
    ) -> torch.Tensor:
        output = self.head.mtp_loss(chunk, states, batch)
        result.add(output.metrics)
        return output.loss * self.args.mtp_loss_scaling_factor

    def _read(self, chunk: Any, hidden: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        return self.head.log_probs(unwrapped(chunk), hidden, batch, with_entropy=False)[0]

    def _from_last_stage(self, columns: list[np.ndarray]) -> list[np.ndarray]:
        """Broadcast the columns, which only the last pipeline stage has computed."""
        if self.parallel.pp_size == 1:
            return columns
        flat = torch.from_numpy(np.concatenate(columns)).to(current_device())
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(flat, last, group=pipeline_group())
        ends = np.cumsum([len(column) for column in columns])
        return np.split(flat.cpu().numpy(), ends[:-1])

    def update_ref(self) -> None:
        self.frozen["ref"].update()

    # ---- checkpoints and weights

    def save_to(self, path: str, rollout_id: int, force_sync: bool = False) -> None:
        if self._ref_is_updated:
            Path(path, _REF).mkdir(exist_ok=True)
            dist.barrier()
            with self.frozen["ref"].swapped_in():
                self._checkpointer.save(f"{path}/{_REF}", rollout_id, self.chunks)
        self._checkpointer.save(
            path,
            rollout_id,
            self.chunks,
            None if self.args.no_save_optim else self.optimizer,
            num_steps=self.optimizer.num_steps,
            in_background=self.args.async_save and not force_sync,
        )

    def wait_write(self) -> None:
        self._checkpointer.wait()

    def load(self, path: str) -> int:
        if self._ref_is_updated and is_checkpoint(f"{path}/{_REF}"):
            self._checkpointer.load_model(f"{path}/{_REF}", self.chunks)
            self.update_ref()
        with_moments = not self.args.no_load_optim
        facts = self._checkpointer.load(path, self.chunks, self.optimizer, moments=with_moments)
        if facts.num_steps is None:  # saved by another tool: count this run's steps per rollout
            steps = (facts.rollout_id + 1) * self.args.num_steps_per_rollout
            self.optimizer.set_num_steps(steps)
        return facts.rollout_id

    @property
    def _ref_is_updated(self) -> bool:
        return "ref" in self.frozen and bool(self.args.ref_update_interval)

    def hf_buckets(self) -> Iterator[HFBucket]:
        merge = None if self.adapters is None else self.adapters.merge()
        return hf_buckets(self.args, self.chunks, self._weights, merge=merge)

    def base_buckets(self) -> Iterator[HFBucket]:
        return hf_buckets(self.args, self.chunks, self._weights)

    def whole_adapters(self, dtype: torch.dtype) -> Iterator[NamedTensor]:
        assert self.adapters is not None, "called with LoRA only"
        return self.adapters.whole(dtype)

    def export_hf(self, path: str, info: ExportInfo | None = None) -> None:
        writes, dtype = self.rank == 0, serving_dtype(self.args)
        if self.adapters is not None:
            self.export_adapter(path, self.adapters.lora, info)
            return
        tensors = export_hf(self.chunks, self._weights, dtype)
        buckets = batches(tensors, lambda named: named[1].nbytes, FILE_BYTES, keep=writes)
        source = self.args.hf_checkpoint
        if writes and self._weights.copies:
            names = HfReader(source).names()
            buckets = with_copies(buckets, self._weights.copies, names)
        everything = chain(buckets, self._untrained(writes))
        write_hf_folder(path, source, dtype, everything, writes=writes, info=info)
        dist.barrier()

    def _untrained(self, wanted: bool) -> Iterator[HFBucket]:
        """Yield the untrained tensors of the checkpoint, such as MTP layers, unchanged."""
        if wanted and self._weights.untrained:
            reader = HfReader(self.args.hf_checkpoint)
            names = [n for n in reader.names() if n.startswith(self._weights.untrained)]
            yield [(name, reader.read(name)) for name in names]

    def drop_gradients(self) -> None:
        self.optimizer.drop_grads()
        return_unused()

    def sleep(self) -> None:
        """Offload parameters and optimizer state to host memory and drop gradients."""
        if self._offloaded is None:
            drop_fp8_copies(self.chunks)
            self.drop_gradients()
            self._offloaded = Offloaded(self._resident())

    def _resident(self) -> Iterator[torch.Tensor]:
        yield from resident_tensors(self.chunks)
        yield from self.optimizer.tensors()

    def _hook(self, flag: str, protocol: type, *values: object) -> None:
        path = getattr(self.args, flag)
        if path is not None:
            load_hook(path, flag=option_of(flag), protocol=protocol)(*values)
