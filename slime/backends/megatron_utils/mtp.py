"""Multi-token prediction (MTP): layers after the last one that predict further tokens.

Layer k combines a position's hidden state with the embedding of the token k+1 positions ahead and
predicts the token after that one, with the embedding and the output layer of the model::

    hidden of token i ──▶ hnorm ─┐
                                 ├─▶ eh_proj ─▶ decoder layer ─▶ norm ─▶ output layer ─▶ token i+2
    embedding of i+1 ───▶ enorm ─┘

Only the MTP layers learn from this: hidden states, embedding and output layer are detached, so the
gradient of the policy is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.layers import RMSNorm
from slime.core.errors import ConfigError

# The value of megatron-core's mark `shared` on parameters of MTP layers. Marked gradients do not
# count in the gradient norm: it is the policy's, and MTP layers are clipped by their own.
MTP_MARK = "mtp"
_STORED = "mtp."  # names in checkpoints begin with it


def mtp_spec(
    config: TransformerConfig, block: TransformerBlockSubmodules, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the specs of the MTP layers, which the last stage has; None on other stages."""
    if not config.mtp_num_layers or not get_mtp_num_layers_to_build(config, vp_stage=vp_stage):
        return None
    if not block.layer_specs:
        raise ConfigError(
            "--enable-mtp-training: the last pipeline stage has no decoder layer: give it one with "
            "--num-layers-in-last-pipeline-stage"
        )
    te = config.transformer_impl == "transformer_engine"
    layer = get_mtp_layer_spec(block.layer_specs[-1], use_transformer_engine=te)
    layer.module = MtpLayer
    parts: Any = layer.submodules
    if not te:
        parts.enorm = parts.hnorm = parts.layer_norm = RMSNorm
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


class MtpLayer(MultiTokenPredictionLayer):
    """megatron-core's layer on embeddings that are looked up outside, so that samples stay apart."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - called from here only
        self, hidden: torch.Tensor, embedded: torch.Tensor, **inputs: Any
    ) -> torch.Tensor:
        run = partial(self._proj_and_transformer_layer, **inputs)
        if self.config.recompute_granularity != "full":
            return run(hidden, embedded)
        distribute = self.config.distribute_saved_activations
        if not self.config.fp8:
            return tensor_parallel.checkpoint(run, distribute, hidden, embedded)
        from megatron.core.extensions.transformer_engine import te_checkpoint

        tracker = tensor_parallel.random.get_cuda_rng_tracker
        group = parallel_state.get_tensor_model_parallel_group()
        return te_checkpoint(run, distribute, tracker, group, hidden, embedded)


def prepare_mtp(model: GPTModel) -> None:
    """Mark the parameters of this chunk's MTP layers, and its own copy of the embedding."""
    for param in model.mtp.parameters():
        param.shared = MTP_MARK  # pyright: ignore[reportAttributeAccessIssue] - megatron-core's mark
    if not model.pre_process:
        # Otherwise Muon would update it in another way than the first stage's embedding.
        weight: Any = model.embedding.word_embeddings.weight
        weight.is_embedding_or_output_parameter = True


def with_mtp_states(
    model: GPTModel,
    *,
    hidden_states: torch.Tensor,  # [S, B, H]
    labels: torch.Tensor | None,  # [MTP layers, B, S]: the tokens 1, 2, ... positions ahead
    rotary_pos_emb: Any,
    packed_seq_params: Any,
    **_: object,
) -> torch.Tensor:
    """Return the hidden states followed by those of each MTP layer: [(1 + MTP layers) * S, B, H].

    Without `labels`, as in passes for log-probs, return the hidden states alone.
    """
    if labels is None:
        return hidden_states
    states = [hidden_states]
    hidden = hidden_states.detach().requires_grad_()  # recomputation needs an input with gradient
    for layer, tokens in zip(model.mtp.layers, labels, strict=True):
        hidden = layer(
            hidden,
            _embed(model, tokens),
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        states.append(hidden)
    return torch.cat(states)


def _embed(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    if model.pre_process:
        with torch.no_grad():
            return model.embedding(input_ids=tokens, position_ids=None)
    # A copy of the first stage's embedding. Its gradient buffer is filled, with zeros, because
    # overlapped reductions wait for every parameter.
    return _ZeroGradient.apply(model.embedding(input_ids=tokens, position_ids=None))


class _ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


def has_mtp_layers(stored: Iterable[str]) -> bool:
    """Return whether multi-token-prediction layers are among these names."""
    return any(name.startswith(_STORED) for name in stored)


def refuse_other_mtp(stored: bool, trained: bool, path: str | Path) -> None:
    """Refuse an optimizer state with MTP layers for a model without, and vice versa."""
    if stored and not trained:
        raise ConfigError(
            f"{path} has MTP layers that were trained: add --mtp-num-layers and --enable-mtp-training, or "
            "continue without them with --no-load-optim"
        )
    if trained and not stored:
        raise ConfigError(
            f"--enable-mtp-training: {path} was trained without MTP layers, so its optimizer has no state of "
            "them: add --no-load-optim, so that they start from --hf-checkpoint, or remove "
            "--enable-mtp-training"
        )


def drop_mtp_layers(state: dict[str, Any]) -> bool:
    """Remove multi-token-prediction layers; return whether there were any."""
    names = [(key, name) for key in state for name in state[key] if name.startswith(_STORED)]
    for key, name in names:
        del state[key][name]
    return bool(names)
