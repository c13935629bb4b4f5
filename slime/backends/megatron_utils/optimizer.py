"""Megatron's optimizer with the learning rate schedule; it skips gradients that are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from slime.backends.megatron_utils.adam import install_adam
from slime.backends.megatron_utils.model_config import flag_fields, refusals_of_megatron
from slime.backends.megatron_utils.mtp import MTP_MARK
from slime.backends.megatron_utils.muon import TensorParallelMuon, make_muon
from slime.backends.megatron_utils.parallel import unwrapped
from slime.backends.optim import LrSchedule
from slime.utils.device import device_type

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_DTYPE_FIELDS = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_GPU_FIELDS = (
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    *_DTYPE_FIELDS,
)


class ScheduledOptimizer:
    def __init__(
        self, args: Args, chunks: list[DistributedDataParallel], schedule: LrSchedule
    ) -> None:
        install_adam()
        self.schedule = schedule
        self.num_steps = 0
        self.moment_steps = 0  # updates that the moments have seen: fewer if they were not loaded
        self.has_moments = False  # after the first update or a load, the same on all ranks
        self._weight_decay = args.weight_decay
        self._chunks = chunks
        self._has_mtp = bool(unwrapped(chunks[0]).config.mtp_num_layers)  # on any stage
        config = optimizer_config(args)
        self._gathers_late = config.overlap_param_gather
        self.inner = make_optimizer(config, chunks, args.optimizer)
        self._set_groups()

    @property
    def lr(self) -> float:
        """Return the learning rate of the next step."""
        return self.schedule.at(self.num_steps)

    def hold_grads(self) -> None:
        """Reallocate the gradient buffers after `drop_grads`, as zeros."""
        for grads in grad_buffers(self._chunks):
            if not grads.untyped_storage().nbytes():
                grads.untyped_storage().resize_(grads.nbytes)
                grads.zero_()

    def drop_grads(self) -> None:
        """Free the gradient buffers until the next step; Megatron's views of them stay valid."""
        self.inner.zero_grad()
        torch.cuda.synchronize()
        for grads in grad_buffers(self._chunks):
            grads.untyped_storage().resize_(0)

    def zero_grad(self) -> None:
        self.hold_grads()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> float:
        """Clip and update; return the norm before clipping. Update nothing if it is not finite.

        Multi-token-prediction layers have a norm of their own, which leaves the policy's updates
        as they are without them.
        """
        self._set_groups()
        if self.inner.prepare_grads():
            return float("nan")
        norm = float(self.inner.get_grad_norm() or 0.0)
        mtp_norm = self._mtp_norm() if self._has_mtp else 0.0
        if not math.isfinite(norm + mtp_norm):
            return norm + mtp_norm
        self._clip(norm, lambda param: not _is_mtp(param))
        if self._has_mtp:
            self._clip(mtp_norm, _is_mtp)
        self.inner.step_with_ready_grads()
        if isinstance(self.inner, LayerWiseDistributedOptimizer):
            _share_params(self.inner)
        self.num_steps += 1
        self.moment_steps += 1
        self.has_moments = True
        if self._gathers_late:  # weights are read before the next forward pass
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        return norm

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._set_groups()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield main parameters and moments, which can be offloaded between steps."""
        for optimizer in self._torch_optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))

    def moments(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield main parameters with the number of moments that each has after its first update."""
        for optimizer in self._torch_optimizers():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    yield param, _num_moments(optimizer, group)

    def _torch_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        for optimizer in self.inner.chained_optimizers:
            inner = getattr(optimizer, "optimizer", None)  # None: no parameters on this rank
            if inner is not None:
                yield inner

    def _params(self) -> Iterator[tuple[OptimizerConfig, list[torch.Tensor]]]:
        """Yield the main parameters of each optimizer of the chain."""
        for optimizer in self.inner.chained_optimizers:
            is_stub = getattr(optimizer, "is_stub_optimizer", False)
            yield optimizer.config, [] if is_stub else [*optimizer.get_parameters()]

    def _mtp_norm(self) -> float:
        """Return the norm of the gradients that the mark `MTP_MARK` excludes from the norm."""
        params: list[Any] = [param for _, params in self._params() for param in params]
        marks = [getattr(param, "shared", False) for param in params]
        for param, mark in zip(params, marks, strict=True):
            param.shared = mark != MTP_MARK
        norm = float(self.inner.get_grad_norm() or 0.0)
        for param, mark in zip(params, marks, strict=True):
            param.shared = mark
        return norm

    def _clip(self, norm: float, of: Callable[[torch.Tensor], bool]) -> None:
        for config, everything in self._params():
            params = [param for param in everything if of(param)]
            if params and config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(
                    params,
                    max_norm=config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )

    def _set_groups(self) -> None:
        for group in self.inner.param_groups:
            group["lr"] = self.lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._weight_decay * group.get("wd_mult", 1.0)


def _is_mtp(param: torch.Tensor) -> bool:
    return getattr(param, "shared", False) == MTP_MARK


def grad_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        buffers: Any = chunk.buffers  # Megatron's list, in place of the method of torch's modules
        for buffer in [*buffers, *chunk.expert_parallel_buffers]:
            yield buffer.grad_data


def make_optimizer(config: OptimizerConfig, chunks: list[Any], kind: str) -> ChainedOptimizer:
    gloo_groups = device_type() == "cuda"
    if kind in ("muon", "dist_muon"):
        return make_muon(config, chunks, gloo_groups=gloo_groups, spread=kind == "dist_muon")
    # Without gradients the shards of fp32 parameters, which are views, are leaves: an optimizer in host
    # memory takes no others.
    with refusals_of_megatron(), torch.no_grad():
        chain: Any = get_megatron_optimizer(config, chunks, use_gloo_process_groups=gloo_groups)
    if kind == "sgd":
        for optimizer in chain.chained_optimizers:
            optimizer.init_state_fn = _zero_momentum
    return chain


def _zero_momentum(sgd: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Allocate zero momentum buffers, as SGD starts; a checkpoint is loaded into them."""
    for group in sgd.param_groups:
        for param in group["params"] if group["momentum"] else ():
            if not sgd.state[param]:
                sgd.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _share_params(optimizer: LayerWiseDistributedOptimizer) -> None:
    """Send the parameters that a data-parallel rank has updated to the other ranks."""
    if device_type() == "cuda":
        optimizer.allgather_params()
    else:  # gloo's all-gather needs equal sizes
        optimizer.broadcast_params()


def _num_moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    if isinstance(optimizer, TensorParallelMuon):
        return 1
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(group["momentum"]))
    return 2


def optimizer_config(args: Args) -> OptimizerConfig:
    fields = flag_fields(args, OptimizerConfig)
    if device_type() == "cpu":
        fields = _fields_on_cpu(fields)
    fields |= {name: _DTYPES[fields[name]] for name in _DTYPE_FIELDS if name in fields}
    # It applies to FP8 parameters; parameters here are bf16.
    fields.pop("fp8_recipe", None)
    half = args.precision == "bf16"
    return OptimizerConfig(
        **{
            **fields,
            "optimizer": args.optimizer,
            "lr": args.lr,
            "min_lr": args.min_lr,
            "weight_decay": args.weight_decay,
            "adam_beta1": args.adam_beta1,
            "adam_beta2": args.adam_beta2,
            "adam_eps": args.adam_eps,
            "sgd_momentum": args.sgd_momentum,
            "muon_momentum": args.muon_momentum,
            "muon_use_nesterov": args.muon_use_nesterov,
            "muon_num_ns_steps": args.muon_num_ns_steps,
            "muon_scale_mode": args.muon_scale_mode,
            "muon_extra_scale_factor": args.muon_extra_scale_factor,
            "clip_grad": args.clip_grad,
            "bf16": half,
            "params_dtype": torch.bfloat16 if half else torch.float32,
            "use_distributed_optimizer": args.use_distributed_optimizer,
            "overlap_param_gather": bool(args.overlap_param_gather),
        }
    )


def _fields_on_cpu(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for a CPU run or a plan, whose optimizer is `GroupStepAdamW` in fp32."""
    if fields.get("optimizer_cpu_offload"):
        logger.info("--optimizer-cpu-offload: everything is in host memory already")
    elif fields.get("use_precision_aware_optimizer"):
        logger.info(
            "--use-precision-aware-optimizer: without a GPU the optimizer's tensors are fp32"
        )
    return {name: value for name, value in fields.items() if name not in _GPU_FIELDS}
