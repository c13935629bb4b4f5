"""LoRA adapters inside Megatron's parallel linear layers.

A linear layer that fuses q, k and v, or gate and up, has an adapter for each of them, as in PEFT. The
low-rank activations A x are what ranks exchange, so an adapter adds little communication::

    column parallel   h = A x, A replicated    y = B h, B sharded by rows      h: copied, or gathered
    row parallel      h = A x, A by columns    y = B h, B replicated           h: summed over the ranks
    replicated        h = A x, A replicated    y = B h, B replicated           (projections of MLA)

With sequence parallelism the replicated matrix sees a rank's sequence shard, and Megatron sums its
gradient over the tensor ranks like that of a norm. Experts: `lora_experts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.ssm.gated_delta_net import (
    _split_tensor_factory,  # pyright: ignore[reportPrivateUsage]
)
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from torch import nn

from slime.backends.megatron_utils.hf_weights.adapters import TensorsReader, adapter_map
from slime.backends.megatron_utils.hf_weights.export import Merge, export_hf
from slime.backends.megatron_utils.hf_weights.local_weights import (
    LocalWeight,
    current_layout,
    load_hf,
    local_weights,
)
from slime.backends.megatron_utils.hf_weights.mappings import GateUp, Mapping
from slime.backends.megatron_utils.hf_weights.rules import WeightMap
from slime.backends.megatron_utils.hf_weights.sections import Sections
from slime.backends.megatron_utils.layers import ValueHead
from slime.backends.megatron_utils.lora_experts import ExpertAdapters, adapt_experts
from slime.backends.megatron_utils.parallel import (
    decoder_layers,
    rng_tracker,
    tensor_group,
)
from slime.config.lora import LoraConfig, refuse_other_base
from slime.config.peft_files import DOWN, GATE_UP, LORA_A, LORA_B, flat_name, peft_modules
from slime.core.errors import ConfigError, UserError
from slime.weights.buckets import NamedTensor, dtype_name
from slime.weights.checksum import RunningChecksums, format_checksum
from slime.weights.peft_folder import by_modules, by_weights, initial_a, read_peft_weights, to_peft

if TYPE_CHECKING:
    from slime.config.arguments import Args


def add_adapters(
    args: Args, chunks: Sequence[GPTModel], weights: WeightMap
) -> ModelAdapters | None:
    """Add the adapters of the --lora-* flags to the chunks; without LoRA do nothing."""
    lora = LoraConfig.of(args)
    return None if lora is None else ModelAdapters(lora, chunks, weights)


class Adapter(nn.Module):
    """This rank's shard of A [rank, in] and B [out, rank], in fp32."""

    def __init__(self, rank: int, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        options = {"dtype": torch.float32, "device": device}
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, **options))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, **options))


class LinearAdapters(nn.ModuleDict):
    """The adapters of the Hugging Face modules that one linear layer of Megatron consists of.

    Dropout is applied in the training pass only: passes without gradients compute the log-probs of
    the policy itself.
    """

    def __init__(
        self,
        lora: LoraConfig,
        weight: torch.Tensor,
        parts: dict[str, bool],
        mapping: Mapping,
        *,
        sequence_parallel: bool,
    ) -> None:
        """`parts` maps the layer's modules, in order, to whether they have an adapter."""
        super().__init__()
        rows, self._groups = mapping.local_rows(weight.shape[0], tensor_group().size())
        self._rows = dict(zip(parts, rows, strict=True))
        self._dim = mapping.dim if tensor_group().size() > 1 else None
        self._scaling, self._dropout = lora.scaling, lora.dropout
        self._sequence_parallel = sequence_parallel
        self.enabled, self.is_training_pass, self.was_called = True, False, False
        for name, outputs in self._rows.items():
            if parts[name]:
                self[name] = Adapter(lora.rank, weight.shape[1], outputs, weight.device)
                self._mark(self[name].lora_A, sharded=1)
                self._mark(self[name].lora_B, sharded=0)

    def _mark(self, matrix: Any, *, sharded: int) -> None:
        """Tell Megatron whether this dimension is sharded; if not, how gradients are summed."""
        is_sharded = self._dim == sharded
        set_tensor_model_parallel_attributes(matrix, is_sharded, sharded if is_sharded else -1, 1)
        matrix.sequence_parallel = self._sequence_parallel and not is_sharded

    @property
    def _adapters(self) -> dict[str, Adapter]:
        return cast("dict[str, Adapter]", dict(self.items()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the layer's output: scaling * B A dropout(x) of each module."""
        self.was_called = True
        low = self._over_tensor_ranks(self._down(x))  # [..., adapters * rank]
        lows = dict(zip(self, low.chunk(len(self), dim=-1), strict=True))
        parts = []
        for name, rows in self._rows.items():
            if name in lows:
                b = self._adapters[name].lora_B.to(low.dtype)
                part = F.linear(lows[name], b) * self._scaling
            else:
                part = low.new_zeros(*low.shape[:-1], rows)
            parts.append(part.unflatten(-1, (self._groups, -1)))
        return torch.cat(parts, dim=-1).flatten(-2)

    def _down(self, x: torch.Tensor) -> torch.Tensor:
        matrices = [adapter.lora_A.to(x.dtype) for adapter in self._adapters.values()]
        if not (self._dropout and self.is_training_pass):
            return F.linear(x, torch.cat(matrices))
        with self._random_state():  # a mask for each module, as in PEFT
            return torch.cat([F.linear(F.dropout(x, self._dropout), a) for a in matrices], dim=-1)

    def _random_state(self) -> Any:
        """Return the random state of dropout: equal masks on all tensor ranks, or one for each shard."""
        is_sharded = self._sequence_parallel or self._dim == 1
        return rng_tracker().fork() if is_sharded else nullcontext()

    def _over_tensor_ranks(self, low: torch.Tensor) -> torch.Tensor:
        if self._dim is None:
            return low
        if self._dim == 0:
            if self._sequence_parallel:
                return mappings.gather_from_sequence_parallel_region(low)
            return mappings.copy_to_tensor_model_parallel_region(low)
        if self._sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(low)
        return mappings.reduce_from_tensor_model_parallel_region(low)


class ModelAdapters:
    """All adapters of this rank's chunks. Adding them freezes everything but a critic's value head."""

    def __init__(self, lora: LoraConfig, chunks: Sequence[GPTModel], weights: WeightMap) -> None:
        self.lora, self._chunks, self._base = lora, chunks, weights
        self.map = adapter_map(weights, lora, chunks[0].config)
        wanted = set(self.map.modules)
        for chunk in chunks:
            chunk.requires_grad_(False)
            for weight in list(local_weights([chunk], weights, current_layout())):
                _add(chunk, weight, lora, wanted)
            _add_experts(chunk, lora, wanted)
            if getattr(chunk, "pre_process", False):
                # Recomputed layers get gradients only if their input requires one.
                chunk.embedding.register_forward_hook(_require_gradient)
            if isinstance(getattr(chunk, "output_layer", None), ValueHead):
                chunk.output_layer.requires_grad_(True)
        self._layers = {
            f"{number}.{name}": module
            for number, chunk in enumerate(chunks)
            for name, module in chunk.named_modules()
            if isinstance(module, (LinearAdapters, ExpertAdapters))
        }

    # ---- passes

    @contextmanager
    def passes(self, *, on: bool, trained: bool) -> Iterator[None]:
        """Run passes with adapters, or with the base weights alone.

        `trained` passes apply dropout, also in the first forward of recomputed layers. Passes with
        adapters must call every adapter.
        """
        for layer in self._layers.values():
            layer.enabled, layer.is_training_pass = on, trained
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enabled, layer.is_training_pass = True, False
        if on:
            self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise UserError if a pass did not call a layer's adapters, which then have no effect."""
        unused = [name for name, layer in self._layers.items() if not layer.was_called]
        if unused:
            raise UserError(
                f"--lora-target-modules: the model's forward pass does not call {unused[0]} (and "
                f"{len(unused) - 1} more), so its adapter would change nothing: name other modules"
            )

    # ---- weights

    def start(self, args: Args, role: str) -> None:
        """Initialize adapters from --lora-adapter-path, or new ones from --seed."""
        if args.lora_adapter_path is not None and role == "actor":
            self.load_folder(args.lora_adapter_path)
        else:
            self.initialize(args.seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initialize A as PEFT does and B to zero; every rank computes the whole A of its shards."""
        layout = current_layout()
        for weight in local_weights(self._chunks, self.map.weights, layout):
            mapping, shard = weight.match.rule.mapping, layout.shard(weight.match.rule)
            (name,) = weight.match.hf_names
            if name.endswith(LORA_B):
                weight.tensor.zero_()
                continue
            shape = mapping.whole_shape(tuple(weight.tensor.shape), shard)
            whole = TensorsReader({name: initial_a(name, shape, seed)})
            mapping.fill(weight.tensor, whole, [name], shard)

    def load_folder(self, path: str) -> None:
        """Load the adapters of a PEFT folder."""
        tensors = read_peft_weights(path)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        modules = {name: module for module, name in peft_modules(self.map.modules).items()}
        names = [name + side for name in modules for side in (LORA_A, LORA_B)]
        refuse_other_base(shapes, {name: shapes.get(name, []) for name in names}, path)
        held = dict(by_modules(tensors, modules, self.lora))
        load_hf(self._chunks, self.map.weights, TensorsReader(held))

    def whole(self, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
        """Yield full adapters by their names in PEFT's files; all ranks must iterate together."""
        return to_peft(self._whole(dtype))

    def merge(self) -> Merge:
        """Gather all adapters, to merge them into weights."""
        return Merge(dict(by_weights(self._whole(), self._base.model_type)), self.lora.scaling)

    def _whole(self, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
        return export_hf(self._chunks, self.map.weights, dtype)

    @cached_property
    def base_checksum(self) -> dict[str, str]:
        """Dtype and checksum of the frozen weights, which identify the base; collective when first read."""
        sums = RunningChecksums()
        dtype = self._chunks[0].config.params_dtype
        for named in export_hf(self._chunks, self._base):
            sums.add([named])
        total = sum(sums.read().values()) % 2**64
        return {"dtype": dtype_name(dtype), "checksum": format_checksum(total)}

    def sharded_state(self, chunk: GPTModel) -> dict[str, Any]:
        """Return what a checkpoint holds of a chunk: adapters and a critic's value head."""
        params = dict(chunk.named_parameters())
        found = local_weights([chunk], self.map.weights, current_layout())
        state = {w.local_name: _sharded(w, params[w.local_name]) for w in found}
        head = getattr(chunk, "output_layer", None)
        if isinstance(head, ValueHead):
            name = "output_layer.weight"
            state[name] = make_sharded_tensor_for_checkpoint(head.weight, name)
        return state


def _add(chunk: GPTModel, weight: LocalWeight, lora: LoraConfig, wanted: set[str]) -> None:
    """Add adapters to the linear layer with this weight, if one of its modules is wanted."""
    modules = [flat_name(name).removesuffix(".weight") for name in weight.match.hf_names]
    parts = {module.rpartition(".")[2]: module in wanted for module in modules}
    if not any(parts.values()):
        return
    config, mapping = chunk.config, weight.match.rule.mapping
    if ".shared_experts." in weight.name and config.moe_shared_expert_overlap:
        raise ConfigError(
            f"--moe-shared-expert-overlap with adapters of shared experts ({modules[0]}): remove the flag, or "
            "name other --lora-target-modules"
        )
    linear: Any = chunk.get_submodule(weight.local_name.rpartition(".")[0])
    sequence = config.sequence_parallel
    linear.lora = LinearAdapters(lora, weight.tensor, parts, mapping, sequence_parallel=sequence)
    linear.register_forward_hook(_add_output)


def _add_experts(chunk: GPTModel, lora: LoraConfig, wanted: set[str]) -> None:
    for layer in decoder_layers(chunk):
        for leaf in (GATE_UP, DOWN):
            if f"model.layers.{layer.layer_number - 1}.mlp.experts.{leaf}" in wanted:
                adapt_experts(layer.mlp.experts, leaf, lora)


def _add_output(linear: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    if not linear.lora.enabled:
        return output
    result, bias = output
    return result + linear.lora(inputs[0]), bias


def _require_gradient(_: nn.Module, inputs: object, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _sharded(weight: LocalWeight, param: torch.Tensor) -> Any:
    mapping = weight.match.rule.mapping
    if weight.match.rule.all_experts:
        return _sharded_experts(weight.name, param, mapping.dim)
    if mapping.dim is None:
        return make_sharded_tensor_for_checkpoint(param, weight.name)
    tensor = make_tp_sharded_tensor_for_checkpoint(param, weight.name, mapping.dim)
    if isinstance(mapping, Sections):
        sizes = mapping.local_sizes(tensor_group().size())
        return _split_tensor_factory(tensor, sizes, [str(i) for i in range(len(sizes))], 0)
    if isinstance(mapping, GateUp):  # one Hugging Face module computes gate and up
        return apply_swiglu_sharded_factory(tensor, ())
    return tensor


def _sharded_experts(name: str, param: torch.Tensor, dim: int | None) -> ShardedTensor:
    """Return one tensor with all experts: dimension 0 is sharded over the expert ranks."""
    layout = current_layout()
    places = [(0, layout.expert.rank, layout.expert.size)]
    if dim is not None:
        places.append((dim, layout.expert_tensor.rank, layout.expert_tensor.size))
    copy = 0 if dim is not None else layout.expert_tensor.rank
    replica = (0, copy, parallel_state.get_expert_data_parallel_rank())
    return ShardedTensor.from_rank_offsets(name, param, *places, replica_id=replica)
