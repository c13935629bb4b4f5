"""A Hugging Face causal LM as an FSDP2 root module: packed samples in, log-probs out.

Attention over packed samples is registered with transformers as `slime_packed`. Transformers builds
no mask for a name without a mask function; sample boundaries are passed as the keyword `packed`,
which every model forwards to its attention function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from slime.algorithms.log_probs import log_probs_from_hidden
from slime.backends.backend import FeatureCache, run_tower
from slime.backends.kernels.packed_attention import PackedLayout, attend_packed, packed_layout
from slime.config.checks.model_types import has_linear_attention, packing_obstacle
from slime.core.errors import ConfigError, UserError
from slime.core.types import TrainBatch

# Attention implementations without attention across packed samples: ours, those that take sequence
# lengths as keywords, and those for which transformers derives a [T, T] mask from the positions.
_TAKES_LENGTHS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_DENSE_MASK = ("sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Options of the forward pass from tokens to log-probs."""

    temperature: float
    chunk_size: int
    padded: bool = False  # a batch of rows padded to equal length, instead of one packed row


class PackedCausalLM(nn.Module):
    """Backbone and log-probs in one FSDP module, whose forward all-gathers the LM head's weight."""

    def __init__(self, hf: PreTrainedModel, head: HeadOptions) -> None:
        super().__init__()
        self.hf = hf
        self.head = head
        self.features = FeatureCache()  # of a frozen vision tower

    def forward(
        self,
        batch: TrainBatch,
        *,
        output: Literal["log_probs", "logits", "hf_logits"] = "log_probs",
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (log-probs [T], entropy [T] or None), 0 at untrained tokens, or (logits, None).

        Logits [T, V] are in the model's dtype and divided by the temperature; `hf_logits` come from
        the Hugging Face model's own forward.
        """
        if output == "hf_logits":
            logits = self.hf(**self._inputs(batch)).logits.flatten(0, 1)
            return logits / self.head.temperature, None
        hidden = self._hidden(batch)
        lm_head = output_layer(self.hf)
        if output == "logits":
            logits = F.linear(hidden, lm_head.weight, lm_head.bias)
            return logits / self.head.temperature, None
        return log_probs_from_hidden(
            hidden,
            lm_head.weight,
            batch.labels,
            bias=lm_head.bias,
            temperature=self.head.temperature,
            chunk_size=self.head.chunk_size,
            with_entropy=with_entropy,
            mask=batch.loss_mask,
        )

    def _hidden(self, batch: TrainBatch) -> torch.Tensor:
        """Return the last hidden state of each token: [T, H]."""
        model: Any = self.hf.base_model
        inputs = self._inputs(batch)
        if hasattr(model, "visual"):
            inputs = image_inputs(model, batch, inputs, self.features)
            model = model.language_model
        return model(**inputs).last_hidden_state.flatten(0, 1)

    def _inputs(self, batch: TrainBatch) -> dict[str, Any]:
        """Return the model's inputs; right padding needs no mask under causal attention."""
        rows = len(batch.rows) if self.head.padded else 1
        config = self.hf.config.get_text_config()
        linear = has_linear_attention(config.model_type)
        keywords = attention_keywords(config._attn_implementation, batch, linear)
        return {
            "input_ids": batch.tokens.view(rows, -1),
            "position_ids": batch.position_ids.view(rows, -1),
            "use_cache": False,
            **({} if self.head.padded else keywords),
        }


class PackedCritic(PackedCausalLM):
    """The same backbone with a value head; its forward returns values [T] in place of log-probs."""

    def __init__(self, hf: PreTrainedModel, head: HeadOptions) -> None:
        old = output_layer(hf).weight
        with torch.device(old.device):
            hf.set_output_embeddings(nn.Linear(old.shape[1], 1, bias=False, dtype=old.dtype))
        super().__init__(hf, head)

    def forward(self, batch: TrainBatch, **_: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self._hidden(batch)
        weight = output_layer(self.hf).weight  # [1, H]
        return F.linear(hidden.float(), weight.float()).squeeze(1) * batch.loss_mask, None


def image_inputs(
    model: Any, batch: TrainBatch, inputs: dict[str, Any], cache: FeatureCache
) -> dict[str, Any]:
    """Return the inputs of the language model, in which features of images replace their tokens.

    FSDP gathers the vision tower with the embeddings and not block by block, so ranks with and without
    images in a micro-batch run the same collectives.
    """
    embeds = model.get_input_embeddings()(inputs["input_ids"])  # [1, T, H]
    inputs = {**inputs, "input_ids": None}
    if batch.mrope_positions is not None:  # dense masks are built from the first of the four
        positions = torch.cat([batch.position_ids[:, None], batch.mrope_positions], dim=1)
        inputs["position_ids"] = positions.T.unsqueeze(1)  # [4, 1, T]
    if batch.pixel_values is None or batch.image_mask is None:
        return {**inputs, "inputs_embeds": embeds + _no_features(model.visual).to(embeds.dtype)}
    features, deepstack = _features(model.visual, batch, embeds.dtype, cache)
    mask = batch.image_mask.unsqueeze(0)  # [1, T]
    inputs["inputs_embeds"] = embeds.masked_scatter(mask.unsqueeze(-1), features)
    if deepstack:
        inputs |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deepstack}
    return inputs


def _features(
    tower: Any, batch: TrainBatch, dtype: torch.dtype, cache: FeatureCache
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return [image tokens, H] in packed order, and the same of each deepstack layer."""
    assert batch.pixel_values is not None and batch.image_grids is not None
    if any(param.requires_grad for param in tower.parameters()):
        found = run_tower(tower, batch.pixel_values.to(dtype), batch.image_grids)
    else:
        found = cache.features(tower, batch, dtype)
    sizes = (batch.image_grids.prod(-1) // tower.spatial_merge_size**2).tolist()

    def packed(features: torch.Tensor) -> torch.Tensor:
        images = features.to(dtype).split(sizes)
        return torch.cat([images[number] for number in batch.image_order or ()])

    return packed(found[0]), [packed(layer) for layer in found[1:]]


def _no_features(tower: nn.Module) -> torch.Tensor:
    """Return 0, with a zero gradient for each trained parameter: FSDP reduces the same on every rank."""
    zero = torch.zeros((), device=next(tower.parameters()).device)
    return zero + sum(p.flatten()[0].float() * 0 for p in tower.parameters() if p.requires_grad)


def output_layer(hf: PreTrainedModel) -> nn.Linear:
    """Return the LM head, or the value head of a critic."""
    layer = hf.get_output_embeddings()
    assert isinstance(layer, nn.Linear), f"{type(hf).__name__} has no linear output layer"
    return layer


def attention_keywords(
    implementation: str | None, batch: TrainBatch, linear: bool = False
) -> dict[str, Any]:
    """Return the keywords that pass sample boundaries to attention and to `linear` attention.

    Dense masks come from the positions, which layers of linear attention do not get.
    """
    if implementation == PACKED_ATTENTION or (linear and implementation in _DENSE_MASK):
        return {"packed": packed_layout(batch.total_lens, batch.tokens.device)}
    if implementation in _TAKES_LENGTHS:
        return {
            "cu_seq_lens_q": batch.cu_seqlens,
            "cu_seq_lens_k": batch.cu_seqlens,
            "max_length_q": batch.max_seqlen,
            "max_length_k": batch.max_seqlen,
        }
    return {}


def choose_attention(requested: str | None, *, padded: bool = False) -> str:
    """Return the implementation to use; raise ConfigError if it could mix packed samples."""
    known = (*(() if padded else (PACKED_ATTENTION,)), *_TAKES_LENGTHS, *_DENSE_MASK)
    if requested is None:
        return "sdpa" if padded else PACKED_ATTENTION
    if requested not in known:
        raise ConfigError(
            f"--attn-implementation {requested} is not known to keep packed samples apart: "
            f"use one of {', '.join(known)}"
        )
    return requested


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device. Buffers stay real: those computed by the constructor
    (such as RoPE frequencies) are in no checkpoint."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def refuse_unpackable(hf: PreTrainedModel) -> None:
    """Raise ConfigError if layers mix tokens outside attention, which would mix packed samples."""
    obstacle = packing_obstacle(hf.config, type(hf))
    if obstacle is not None:
        raise ConfigError(
            f"{type(hf).__name__} {obstacle}: the FSDP trainer cannot keep packed samples apart in it: add "
            "--qkv-format bshd"
        )


@torch.no_grad()
def check_head(model: PackedCausalLM, device: torch.device) -> None:
    """Raise UserError if the model computes logits by more than one matmul from hidden states.

    Some models scale or cap their logits. Log-probs here are computed from hidden states and the LM
    head's weight, so they would be silently wrong. All ranks must call this, since it is a forward
    pass. A critic has no logits to compare; only the pass runs.
    """
    tokens = torch.arange(4, device=device)
    batch = TrainBatch(
        tokens=tokens,
        position_ids=tokens,
        labels=tokens,
        loss_mask=torch.ones(4, device=device),
        loss_weights=torch.zeros(4, device=device),
        cu_seqlens=torch.tensor([0, 4], dtype=torch.int32, device=device),
        max_seqlen=4,
        rows=[0],
        prompt_lens=[1],
        response_lens=[3],
    )
    logits, _ = model(batch, output="logits")
    if isinstance(model, PackedCritic):
        return
    expected, _ = model(batch, output="hf_logits")
    if not torch.allclose(logits.float(), expected.float(), rtol=1e-2, atol=1e-2):
        raise UserError(
            f"{type(model.hf).__name__} changes its logits after the output layer (a scale or a cap), "
            "which the FSDP trainer does not do; train it with another backend"
        )


PACKED_ATTENTION = "slime_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, D]
    key: torch.Tensor,  # [1, kv heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, heads, D]. Dropout is not applied: log-probs must be deterministic."""
    for name in ("softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(
                f"{type(module).__name__} needs attention with {name}, which {PACKED_ATTENTION} lacks: "
                "use an implementation that has it, e.g. --attn-implementation flash_attention_2 or eager"
            )
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    out = attend_packed(
        query, key, value, packed, scale=scaling, window=sliding_window or None, sinks=s_aux
    )
    return out.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
