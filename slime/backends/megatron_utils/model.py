"""The Megatron model of one rank: its chunks, frozen copies of its weights, and the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from slime.algorithms.log_probs import log_probs_from_hidden
from slime.backends.megatron_utils.architecture import Architecture, architecture
from slime.backends.megatron_utils.hf_weights.local_weights import current_layout, local_weights
from slime.backends.megatron_utils.hf_weights.rules import WeightMap
from slime.backends.megatron_utils.layers import ValueHead, block_spec
from slime.backends.megatron_utils.mlp import use_gated_mlps
from slime.backends.megatron_utils.model_config import (
    flag_fields,
    padded_vocab_size,
    refusals_of_megatron,
)
from slime.backends.megatron_utils.mtp import mtp_spec, prepare_mtp, with_mtp_states
from slime.backends.megatron_utils.parallel import tensor_group
from slime.backends.megatron_utils.rope import (
    PackedRotary,
    Rope,
    has_packed_rotary,
    install_fused_rotation,
)
from slime.backends.megatron_utils.vision import attach_tower, frozen_tower
from slime.backends.param_names import Freezing, names_of, refuse_nothing_trained
from slime.config import hook_types
from slime.core.types import LossOutput, MetricSum, TrainBatch
from slime.utils.device import current_device
from slime.utils.load_function import load_hook

if TYPE_CHECKING:
    from slime.config.arguments import Args


def build_chunks(
    args: Args, config: TransformerConfig, hf_config: PretrainedConfig, *, critic: bool = False
) -> list[GPTModel]:
    """Return this pipeline rank's model chunks, one per virtual stage; weights are loaded later."""
    provider = None
    if args.custom_model_provider_path is not None:
        provider = load_hook(
            args.custom_model_provider_path,
            flag="--custom-model-provider-path",
            protocol=hook_types.ModelProvider,
        )
    arch, virtual = architecture(hf_config), config.virtual_pipeline_model_parallel_size
    chunks = [
        _build(args, config, arch, provider, stage, critic=critic)
        for stage in ([None] if virtual is None else range(virtual))
    ]
    attach_tower(args, config, chunks)
    return chunks


def freeze(args: Args, chunks: Sequence[torch.nn.Module], weights: WeightMap) -> None:
    """Set requires_grad by --only-train-params-name-list and --freeze-params-name-list.

    `check_freezing` has refused patterns that match nothing or a part of a fused parameter.
    """
    freezing = Freezing.of(args)
    if not freezing.is_set:
        return
    params = {_storage(param): param for chunk in chunks for param in chunk.parameters()}
    tied = weights.is_tied
    hf_names: list[str] = []
    for weight in local_weights(chunks, weights, current_layout()):
        param = params.get(_storage(weight.tensor))
        if param is not None:
            hf_names += weight.match.hf_names
            names = [n for hf in weight.match.hf_names for n in names_of(hf, tied=tied)]
            param.requires_grad_(freezing.is_trained([weight.name, *names]))
    count = torch.tensor(sum(p.requires_grad for p in params.values()), device=current_device())
    dist.all_reduce(count)
    if not count:
        refuse_nothing_trained(hf_names)


def wrap_chunks(
    args: Args, config: TransformerConfig, chunks: list[GPTModel]
) -> list[DistributedDataParallel]:
    """Wrap the chunks so that gradients are summed over the data-parallel ranks."""
    fields = flag_fields(args, DistributedDataParallelConfig)
    fields.setdefault("grad_reduce_in_fp32", args.main_grads_dtype != "bf16")
    with refusals_of_megatron():
        ddp_config = DistributedDataParallelConfig(**fields)
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if ddp_config.overlap_grad_reduce:
        # Reduce after the last micro-batch only: steps may have different numbers of them.
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]  # pyright: ignore[reportAttributeAccessIssue] - a list is supported
    return wrapped


def _build(
    args: Args,
    config: TransformerConfig,
    arch: Architecture,
    provider: Callable[..., Any] | None,
    vp_stage: int | None,
    *,
    critic: bool,
) -> GPTModel:
    place = {"ignore_virtual": False, "vp_stage": vp_stage}
    first = parallel_state.is_pipeline_first_stage(**place)
    last = parallel_state.is_pipeline_last_stage(**place)
    rope = arch.rope
    if provider is not None:
        model = provider(first, last, vp_stage=vp_stage)
    else:
        # megatron-core annotates the spec and the base more narrowly than it uses them.
        base: Any = rope.base
        with refusals_of_megatron():
            spec: Any = block_spec(config, vp_stage, split_norms=bool(args.lora_rank))
            model = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=padded_vocab_size(arch.vocab_size, args),
                max_sequence_length=arch.max_sequence_length,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=arch.tied and not critic,
                position_embedding_type="rope",
                rotary_percent=rope.percent,
                rotary_base=base,
                vp_stage=vp_stage,
                mtp_block_spec=mtp_spec(config, spec, vp_stage),  # pyright: ignore[reportArgumentType]
            )
        if rope.frequencies is not None:
            device = model.rotary_pos_emb.inv_freq.device
            model.rotary_pos_emb.inv_freq = torch.tensor(rope.frequencies, device=device)
    _replace_modules(model, config, rope, value_head=critic and last)
    return model


def _replace_modules(
    model: Any, config: TransformerConfig, rope: Rope, *, value_head: bool
) -> None:
    """Replace modules that a layer spec cannot name, and let the last stage return hidden states."""
    if value_head:
        model.output_layer = ValueHead(config)
    if has_packed_rotary(config):
        install_fused_rotation()
        model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb, rope.sections)
    use_gated_mlps(model)
    model.to(current_device())  # routers are created on the CPU
    # Log-probs are computed from hidden states in chunks, so the last stage returns no logits.
    model._postprocess = _hidden_states
    if getattr(model, "mtp_process", False):
        prepare_mtp(model)
        model._postprocess = partial(with_mtp_states, model)


def _hidden_states(*, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
    return hidden_states


@dataclass(frozen=True, kw_only=True)
class Head:
    """Turn hidden states of the last stage into log-probs, values or logits."""

    vocab_size: int  # without padding
    temperature: float
    chunk_size: int

    def log_probs(
        self, chunk: GPTModel, hidden: torch.Tensor, batch: TrainBatch, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs [T], or a critic's values, and entropy [T] or None; 0 where masked."""
        hidden = _whole(chunk, hidden, len(batch.tokens))
        if isinstance(chunk.output_layer, ValueHead):
            return chunk.output_layer(hidden), None
        return log_probs_from_hidden(
            hidden,
            _output_weight(chunk),
            batch.labels,
            temperature=self.temperature,
            with_entropy=with_entropy,
            mask=batch.loss_mask,
            **self._options(),
        )

    def mtp_loss(
        self, chunk: GPTModel, states: Sequence[torch.Tensor], batch: TrainBatch
    ) -> LossOutput:
        """Return the cross-entropy of further tokens, averaged over the MTP layers.

        `states` are the hidden states of each. A token has the weight that it has in the loss of
        the policy. No gradient reaches the output layer, and --rollout-temperature does not apply.
        """
        assert batch.mtp_labels is not None and batch.mtp_weights is not None
        losses = []
        for hidden, labels, weights in zip(
            states, batch.mtp_labels, batch.mtp_weights, strict=True
        ):
            hidden = _whole(chunk, hidden, len(batch.tokens))
            weight = _output_weight(chunk).detach()
            log_probs, _ = log_probs_from_hidden(
                hidden, weight, labels, mask=weights, **self._options()
            )
            losses.append(-(log_probs * weights).sum())
        total = torch.stack(losses).sum()
        sums = MetricSum(total=float(total.detach()), count=float(batch.mtp_weights.sum()))
        return LossOutput(loss=total / len(losses), metrics={"mtp_loss": sums})

    def _options(self) -> dict[str, Any]:
        group = tensor_group()
        return {
            "chunk_size": self.chunk_size,
            "tp_group": group if group.size() > 1 else None,
            "vocab_size": self.vocab_size,
        }

    def logits(self, chunk: GPTModel, hidden: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        """Return logits / temperature [T, V] in the model's dtype, equal on all tensor ranks."""
        weight = _output_weight(chunk) if chunk.share_embeddings_and_output_weights else None
        logits, _ = chunk.output_layer(hidden, weight=weight)
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        logits = logits.transpose(0, 1).flatten(0, 1)[: len(batch.tokens), : self.vocab_size]
        return logits / self.temperature


def _whole(chunk: GPTModel, hidden: torch.Tensor, length: int) -> torch.Tensor:
    """Return hidden states [T, H] in packing order, from [S, B, H] or its sequence shard."""
    if chunk.config.sequence_parallel:
        # The caller sums the gradient over the tensor ranks itself.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return hidden.transpose(0, 1).flatten(0, 1)[:length]


def _output_weight(chunk: GPTModel) -> torch.Tensor:
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    weight = chunk.output_layer.weight
    assert weight is not None, "only tied embeddings leave it out"
    return weight


def drop_fp8_copies(chunks: Sequence[torch.nn.Module]) -> None:
    """Free the FP8 copies of weights; TransformerEngine quantizes them again in every step."""
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a key of a tensor's storage that also works on the meta device, without addresses."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


class HostWeights:
    """A copy of the chunks' weights in host memory, swapped in for the passes of a frozen model."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._copy = _to_host(chunks)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap these weights into the chunks inside the `with`; restore the chunks' own after."""
        own = _to_host(self._chunks)
        _from_host(self._chunks, self._copy)
        try:
            yield
        finally:
            _from_host(self._chunks, own)

    def update(self) -> None:
        """Replace the copy by the current weights of the chunks."""
        self._copy = _to_host(self._chunks)


def resident_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield what the chunks hold on the device, the frozen vision tower included."""
    yield from _tensors(chunks)
    yield from frozen_tower(chunks)


def _tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


@torch.no_grad()
def _to_host(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    copies = []
    for tensor in _tensors(chunks):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies.append(copy.copy_(tensor, non_blocking=True))
    torch.cuda.synchronize()
    return copies


@torch.no_grad()
def _from_host(chunks: Sequence[torch.nn.Module], copies: list[torch.Tensor]) -> None:
    for tensor, copy in zip(_tensors(chunks), copies, strict=True):
        tensor.copy_(copy, non_blocking=True)
    torch.cuda.synchronize()
