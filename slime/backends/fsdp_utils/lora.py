"""LoRA adapters inside the linear layers of a Hugging Face model.

A target layer keeps its name and its frozen weight, and gets two trained matrices below it, so that
names of base weights stay those of the checkpoint and names of adapters are PEFT's without a prefix::

    model.layers.0.self_attn.q_proj.weight          [out, in]     frozen, in the compute dtype or in FP8
    model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]    trained, fp32
    model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]   trained, fp32

FSDP shards dimension 0, so a rank's rows of B belong to its rows of the weight: adapters are merged
shard by shard, and only A is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from slime.backends.fsdp_utils.fp8_base import hold_in_fp8
from slime.backends.fsdp_utils.lora_experts import (
    ExpertAdapter,
    adapt_experts,
    adapter_module,
    expert_modules,
    is_plain,
    patch_experts,
)
from slime.backends.kernels.fused_ops import SCALE, base_linear
from slime.config.checks.model_types import in_tower
from slime.config.lora import LoraConfig
from slime.config.peft_files import LORA_A, LORA_B, flat_name, is_experts
from slime.core.errors import UserError
from slime.weights.fp8_format import Fp8Format
from slime.weights.peft_folder import initial_a


class Fp8Linear(nn.Linear):
    """A linear layer whose weight is held in FP8."""

    def __init__(self, base: nn.Linear, layout: Fp8Format) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        hold_in_fp8(self, "weight", layout)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return base_linear(self, input)


class LoraLinear(nn.Linear):
    """A linear layer with an adapter: y = W x + b + scaling * B A dropout(x).

    Dropout is applied in the training pass only: passes without gradients compute the log-probs of
    the policy itself.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        if isinstance(base, Fp8Linear):
            self.register_buffer(
                "weight" + SCALE, base.get_buffer("weight" + SCALE), persistent=False
            )
            self.fp8 = base.fp8
        options = {"bias": False, "device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(base.in_features, config.rank, **options)
        self.lora_B = nn.Linear(config.rank, base.out_features, **options)
        self.scaling, self.dropout = config.scaling, config.dropout
        self.enabled = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = base_linear(self, input)
        if not self.enabled:
            return output
        if self.dropout and torch.is_grad_enabled():
            input = F.dropout(input, self.dropout)
        # One matmul accumulates into `output`; a separate B A x would be written and read again.
        low = (self.lora_A(input) * self.scaling).flatten(0, -2)  # [T, rank]
        added = torch.addmm(output.flatten(0, -2), low, self.lora_B.weight.t())
        return added.view_as(output)


def add_adapters(hf: PreTrainedModel, config: LoraConfig) -> None:
    """Replace the target layers; the base is frozen and only adapters require gradients."""
    head = hf.get_output_embeddings()
    paths = {
        flat_name(name): name
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear) and module is not head and not in_tower(name)
    }
    hf.requires_grad_(False)
    experts = {flat_name(name): module for name, module in expert_modules(hf).items()}
    for name in config.targets(paths, experts):
        if name in experts:
            adapt_experts(experts[name], name.rpartition(".")[2], config)
            continue
        base = hf.get_submodule(paths[name])
        if type(base) is not nn.Linear and type(base) is not Fp8Linear:
            raise UserError(
                f"--lora-target-modules: {name} is a {type(base).__name__}, whose forward an adapter "
                "would replace: name other modules"
            )
        hf.set_submodule(paths[name], LoraLinear(base, config))


def hold_base_in_fp8(hf: PreTrainedModel, names: list[str], layout: Fp8Format) -> None:
    """Hold these parameters in FP8 if their layers can dequantize them."""
    head = hf.get_output_embeddings()  # its weight is read without a call
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = hf.get_submodule(owner)
        if is_experts(name) and is_plain(module):
            patch_experts(module)
            hold_in_fp8(module, leaf, layout)
        elif type(module) is nn.Linear and module is not head:
            hf.set_submodule(owner, Fp8Linear(module, layout))


def is_adapter(name: str) -> bool:
    return name.endswith((LORA_A, LORA_B))


@torch.no_grad()
def initialize_adapters(params: dict[str, DTensor], seed: int) -> None:
    """Initialize A as PEFT does and B to zero; every rank computes whole matrices."""
    for name, param in params.items():
        if param.is_meta or not is_adapter(name):
            continue
        if name.endswith(LORA_B):
            param.to_local().zero_()
        else:
            copy_shard(param, initial_a(adapter_module(name), param.shape, seed))


@torch.no_grad()
def copy_shard(param: DTensor, whole: torch.Tensor) -> None:
    """Copy this rank's rows of a whole tensor."""
    local, start = param.to_local(), first_row(param)
    local.copy_(whole[start : start + local.shape[0]])


def first_row(param: DTensor) -> int:
    """Return where this rank's rows begin; FSDP shards dimension 0 like torch.chunk."""
    mesh = param.device_mesh
    return min(mesh.get_local_rank() * -(-param.shape[0] // mesh.size()), param.shape[0])


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Compute with the base weights alone inside the `with`."""
    layers = [layer for layer in module.modules() if isinstance(layer, (LoraLinear, ExpertAdapter))]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


@contextmanager
def all_adapters_used(module: nn.Module) -> Iterator[None]:
    """Raise UserError if a forward pass inside the `with` does not call a layer's adapter.

    A model that reads the weight of a layer instead of calling it would train an adapter
    without effect.
    """
    kinds = (LoraLinear, ExpertAdapter)
    layers = {n: layer for n, layer in module.named_modules() if isinstance(layer, kinds)}
    used: set[str] = set()
    hooks = [
        layer.lora_A.register_forward_hook(lambda *_, name=name: used.add(name))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    unused = sorted(layers.keys() - used)
    if unused:
        raise UserError(
            f"--lora-target-modules: the model's forward pass does not call {unused[0]} (and "
            f"{len(unused) - 1} more), so its adapter would change nothing: name other modules"
        )
