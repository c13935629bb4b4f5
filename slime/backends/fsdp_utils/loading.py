"""Build a model on the meta device, shard it over the ranks, then load each rank's shards.

Only rank 0 reads the checkpoint, with transformers, which maps the files of every model family to
its module. Tensors are broadcast one at a time; each rank keeps its shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from slime.backends.base import first_weights
from slime.backends.fsdp_utils.delta_net import pack_delta_nets
from slime.backends.fsdp_utils.expert_parallel import ExpertGroups, parallelize_experts
from slime.backends.fsdp_utils.fp8_base import (
    BaseFiles,
    check_shape,
    fp8_base_format,
    quantized_parameters,
)
from slime.backends.fsdp_utils.lora import (
    add_adapters,
    all_adapters_used,
    copy_shard,
    first_row,
    hold_base_in_fp8,
    initialize_adapters,
    is_adapter,
)
from slime.backends.fsdp_utils.lora_experts import adapter_module
from slime.backends.fsdp_utils.model import (
    HeadOptions,
    PackedCausalLM,
    PackedCritic,
    check_head,
    choose_attention,
    output_layer,
    parameters_on_meta,
    refuse_unpackable,
)
from slime.backends.kernels.fused_ops import SCALE, fuse_mlps, fuse_norms, fuse_rope
from slime.config.checks.model_types import in_tower, takes_images
from slime.config.lora import LoraConfig, refuse_other_base
from slime.config.peft_files import LORA_A, LORA_B, adapter_shapes, flat_name, is_experts
from slime.core.errors import UserError
from slime.data.tokenizer import load_hf_config
from slime.utils.device import current_device, device_type
from slime.weights.buckets import StoredNames, dtype_name, stored_names
from slime.weights.checksum import format_checksum, tensor_checksum
from slime.weights.fp8 import load_causal_lm
from slime.weights.fp8_format import Fp8Format
from slime.weights.peft_folder import from_peft, read_peft_weights, to_peft

if TYPE_CHECKING:
    from slime.config.arguments import Args

_SAMPLING_ROUTER = "PhimoeTopKRouter"


@dataclass(frozen=True)
class ShardedModel:
    """A model of which this rank holds one shard of every parameter."""

    module: PackedCausalLM
    params: dict[str, DTensor]  # by name in the Hugging Face module; tied weights occur once
    lora: LoraConfig | None = None  # of the adapters among `params`
    stored: StoredNames = field(default_factory=StoredNames)  # names in --hf-checkpoint
    fp8: Fp8Format | None = None  # of the frozen parameters that have `scales`

    @cached_property
    def own(self) -> dict[str, DTensor]:
        """With LoRA: the parameters that are trained, i.e. adapters and the head of a critic."""
        head = self.value_head
        return {n: p for n, p in self.params.items() if is_adapter(n) or n == head}

    @property
    def value_head(self) -> str | None:
        """The name of a critic's value head; None for an actor."""
        if not isinstance(self.module, PackedCritic):
            return None
        head = output_layer(self.module.hf).weight
        return next(name for name, param in self.params.items() if param is head)

    def tensors(self, *, without: str | None = None) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, except adapters and `without`."""
        buffers = {name: self.module.hf.get_buffer(name) for name in self._buffer_names}
        named = {**{n: p for n, p in self.params.items() if not is_adapter(n)}, **buffers}
        return {name: tensor for name, tensor in named.items() if name != without}

    @cached_property
    def scales(self) -> dict[str, torch.Tensor]:
        """The scales of parameters that are held in FP8, by name."""
        named = self.module.hf.named_buffers() if self.fp8 is not None else ()
        return {name: buffer for name, buffer in named if name.endswith(SCALE)}

    @cached_property
    def base_checksum(self) -> dict[str, str]:
        """Dtype and checksum of the frozen weights, which identify the base; collective when first read."""
        total = 0
        for name, tensor in {**self.tensors(without=self.value_head), **self.scales}.items():
            if isinstance(tensor, DTensor):
                local, start = tensor.to_local(), first_row(tensor) * math.prod(tensor.shape[1:])
                total += tensor_checksum(name, local, start)
            elif dist.get_rank() == 0:
                total += tensor_checksum(name, tensor)
        sums: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sums, total)
        dtype = next(param.dtype for name, param in self.params.items() if name not in self.own)
        kind = ("FP8 and " if self.scales else "") + dtype_name(dtype)
        return {"dtype": kind, "checksum": format_checksum(sum(sums) % 2**64)}

    @cached_property
    def _buffer_names(self) -> list[str]:
        """Names of persistent buffers; cached, since walking all modules is slow."""
        return list(persistent_buffers(self.module.hf))

    @property
    def is_whole(self) -> bool:
        """Whether the model is unsharded, i.e. this is the only rank."""
        return next(iter(self.params.values())).device_mesh.size() == 1

    @property
    def root(self) -> FSDPModule:
        """The whole module, which `fully_shard` has made an FSDPModule."""
        assert isinstance(self.module, FSDPModule)
        return self.module

    def reshard(self) -> None:
        """Free unsharded parameters: without a backward pass they would stay and become stale."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def build_model(
    args: Args,
    mesh: DeviceMesh,
    *,
    trainable: bool,
    critic: bool = False,
    experts: ExpertGroups | None = None,
) -> ShardedModel:
    """Build the model of `--hf-checkpoint`, sharded, with uninitialized parameters.

    With `experts`, MoE experts are distributed over the ranks of these groups.

    A trained model has fp32 parameters and computes in the run's precision; a frozen one, and the
    base of a model with adapters, also has parameters in that precision. A base that is
    stored in FP8 blocks stays in FP8.
    """
    compute_dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    lora = LoraConfig.of(args) if trainable else None
    hf = _skeleton(args, torch.float32 if trainable and lora is None else compute_dtype)
    padded = args.qkv_format == "bshd"
    if not padded:
        refuse_unpackable(hf)
    if trainable and args.gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    hf.train(trainable)
    _no_randomness(hf)
    hf.requires_grad_(trainable)
    stored = stored_names(args.hf_checkpoint, hf.config.model_type or "")
    fp8 = None if lora is None else fp8_base_format(args)
    if lora is not None:
        if fp8 is not None:
            names = quantized_parameters(hf, first_weights(args, "actor"), stored)
            hold_base_in_fp8(hf, names, fp8)
        add_adapters(hf, lora)
    pack_delta_nets(hf, padded=padded)
    fuse_norms(hf)
    if device_type() == "cuda":
        fuse_mlps(hf)
        fuse_rope(hf)
    head = HeadOptions(
        temperature=args.rollout_temperature, chunk_size=args.log_probs_chunk_size, padded=padded
    )
    module = PackedCritic(hf, head) if critic else PackedCausalLM(hf, head)
    if critic:
        output_layer(hf).float()  # trained, so fp32 even if the base is not
    # A single rank has nothing to all-gather: it keeps the cast parameters for the backward pass,
    # unless frozen ones are in that dtype already and would be held twice.
    reshard = mesh.size() > 1 or lora is not None
    ignored = set() if experts is None else parallelize_experts(hf, mesh, experts, compute_dtype)
    offload = CPUOffloadPolicy(pin_memory=device_type() == "cuda")
    _shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=offload if args.fsdp_cpu_offload else OffloadPolicy(),
        reshard_after_forward=reshard,
        ignored_params=ignored,
    )
    _materialise(module, torch.device("cpu") if args.fsdp_cpu_offload else current_device())
    params: dict[str, DTensor] = {k: p for k, p in hf.named_parameters() if isinstance(p, DTensor)}
    initialize_adapters(params, args.seed)
    return ShardedModel(module, params, lora, stored, fp8)


def load_hf_weights(model: ShardedModel, path: str) -> None:
    """Load the parameters from a Hugging Face folder; a collective call.

    A critic's value head, which such a folder does not have, is initialized to zero.
    """
    source: dict[str, torch.Tensor] = {}
    targets = model.tensors(without=model.value_head)
    zero_value_head(model)
    if model.fp8 is not None:
        _load_fp8_weights(model, path, model.fp8)
        return
    if dist.get_rank() == 0:
        transformers_logging.disable_progress_bar()
        towered = hasattr(model.module.hf.base_model, "visual")
        hf = load_causal_lm(path, auto=AutoModelForImageTextToText if towered else None)
        source = {**dict(hf.named_parameters()), **persistent_buffers(hf)}
    described = [{name: (tensor.dtype, tensor.shape) for name, tensor in source.items()}]
    dist.broadcast_object_list(described)
    found = described[0]
    for name, target in targets.items():
        check_shape(path, name, target.shape, found[name][1] if name in found else None)
    for name, target in targets.items():
        _fill(target, source.pop(name, None), found[name][0])


def _load_fp8_weights(model: ShardedModel, path: str, layout: Fp8Format) -> None:
    """Load a base in FP8 tensor by tensor, without transformers, which would dequantize all of it."""
    files = BaseFiles(model.module.hf, path, model.stored, layout)
    targets = {**model.tensors(without=model.value_head), **model.scales}
    for name, target in targets.items():
        files.check(name, target, packed=name + SCALE in model.scales)
    for name, target in targets.items():
        reads = dist.get_rank() == 0
        whole = files.read(name, target, packed=name + SCALE in model.scales) if reads else None
        _fill(target, whole, target.dtype)


def load_adapter(model: ShardedModel, path: str) -> None:
    """Load the adapters from a PEFT folder; a collective call."""
    adapters = {adapter_module(n): p for n, p in model.params.items() if is_adapter(n)}
    wanted = dict(to_peft((n, torch.empty(p.shape, device="meta")) for n, p in adapters.items()))
    refuse_other_base(
        adapter_shapes(Path(path)), {flat_name(n): list(t.shape) for n, t in wanted.items()}, path
    )
    # `from_peft` may refuse the file: then every rank reads it, so that all of them raise.
    reads = dist.get_rank() == 0 or (model.lora is not None and model.lora.experts_shared_outer)
    source = read_peft_weights(path) if reads else {}
    for (name, param), peft_name in zip(adapters.items(), wanted, strict=True):
        whole = source.get(flat_name(peft_name))
        module = name.removesuffix(LORA_A).removesuffix(LORA_B)
        if whole is not None and is_experts(module):
            count = model.params[module].shape[0]
            whole = from_peft(whole, name, count, shared=param.ndim == 2)
        _fill(param, None if whole is None else whole.float(), torch.float32)


@torch.no_grad()
def zero_value_head(model: ShardedModel) -> None:
    if model.value_head is not None:
        model.params[model.value_head].to_local().zero_()


def finish_loading(model: ShardedModel) -> None:
    """Run one forward pass after loading: it checks the LM head and initializes FSDP's storage."""
    with all_adapters_used(model.module):
        check_head(model.module, current_device())
    model.reshard()


def shard_of(param: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the sharding of `param` and `local` as this rank's rows of it."""
    shape = torch.Size([param.shape[0], *local.shape[1:]])
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _skeleton(args: Args, dtype: torch.dtype) -> PreTrainedModel:
    """Return the Hugging Face model with parameters on the meta device and real buffers."""
    config: Any = load_hf_config(args.hf_checkpoint)
    vars(config).pop("quantization_config", None)  # FP8 weights are trained dequantized
    attention = choose_attention(args.attn_implementation, padded=args.qkv_format == "bshd")
    family: Any = AutoModelForCausalLM
    own: Any = attention
    if takes_images(config.model_type, bool(args.multimodal_keys)):
        family = AutoModelForImageTextToText
        # Patches attend to all patches of their image, so not with packed causal attention.
        own = {"": attention, "text_config": attention, "vision_config": "sdpa"}
    with parameters_on_meta():
        try:
            return family.from_config(
                config, attn_implementation=own, dtype=dtype, trust_remote_code=False
            )
        except (ImportError, ValueError) as error:  # not installed, or not for this model
            raise UserError(
                f"{args.hf_checkpoint} cannot be built as a causal model with attention {attention}: "
                f"{error}"
            ) from None


def _shard(module: PackedCausalLM, **options: Any) -> None:
    for layer in _decoder_layers(module.hf):
        fully_shard(layer, **options)
    fully_shard(module, **options)


def _decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that FSDP gathers one by one; for a vision tower see `image_inputs`."""
    kinds = set(hf._no_split_modules or ())
    named = hf.named_modules()
    return [
        module for name, module in named if type(module).__name__ in kinds and not in_tower(name)
    ]


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate parameters on `device`; buffers keep their values and move to the compute device."""
    buffers = dict(module.named_buffers())
    module.to_empty(device=device)
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, value.to(current_device()))


def _fill(target: torch.Tensor, full: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Broadcast one full tensor from rank 0; each rank keeps its shard."""
    device = current_device()
    full = torch.empty(target.shape, dtype=dtype, device=device) if full is None else full.detach()
    if dist.get_world_size() > 1:
        full = full.to(device).contiguous()
        dist.broadcast(full, src=0)
    if isinstance(target, DTensor):
        copy_shard(target, full)
    else:
        target.copy_(full)


def persistent_buffers(hf: nn.Module) -> dict[str, torch.Tensor]:
    names = hf.state_dict().keys()
    return {name: buffer for name, buffer in hf.named_buffers() if name in names}


def _no_randomness(hf: nn.Module) -> None:
    """Disable dropout and router noise: with random log-probs the ratio of new to old would not start at 1.

    Layers read probabilities from their modules or the config. A router that samples experts in training
    mode chooses the best ones in evaluation mode, where its jitter is the width of a threshold.
    """
    configs = [m.config for m in hf.modules() if isinstance(m, PreTrainedModel)]
    for holder in (*hf.modules(), *configs):
        if type(holder).__name__ == _SAMPLING_ROUTER:
            holder.eval()
            continue
        if isinstance(holder, _DropoutNd):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if type(value) is float and ("drop" in name or "jitter" in name):
                setattr(holder, name, 0.0)
