"""Images in a Megatron model: features of the vision tower replace and enrich embeddings of image tokens.

Hugging Face's tower runs on the first pipeline stage, whole on every tensor rank. Its last features
replace the embeddings of image tokens; those of earlier blocks (deepstack) are added to the hidden
states after the first decoder layers. A frozen tower is loaded when the first images arrive, so that a
run on text does not pay for it; a trained one is a module of the model, as `visual`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoModel, PretrainedConfig

from slime.backends.backend import FeatureCache, run_tower
from slime.backends.megatron_utils.attention import PackedRows
from slime.backends.megatron_utils.hf_weights.mappings import Plain
from slime.backends.megatron_utils.hf_weights.reader import HfReader
from slime.backends.megatron_utils.hf_weights.rules import Rule
from slime.backends.megatron_utils.parallel import (
    all_gather,
    context_group,
    decoder_layers,
    tensor_group,
)
from slime.config.checks.model_types import TOWER, trains_tower
from slime.core.errors import ConfigError, UserError
from slime.core.packing import join_slices, zigzag_index
from slime.core.types import TrainBatch
from slime.data.tokenizer import load_hf_config
from slime.utils.device import current_device

VISUAL = "visual."  # prefix of the parameters of a trained tower in Megatron's model

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from slime.config.arguments import Args


@dataclass(frozen=True, kw_only=True)
class ImageFeatures:
    """Features of the image tokens of one micro-batch that this rank holds.

    `places` are their positions in the rank's sequence, `embeddings` and each of `deepstack`
    have one row for each of them.
    """

    places: torch.Tensor  # [n]
    embeddings: torch.Tensor  # [n, H]
    deepstack: tuple[torch.Tensor, ...]  # for decoder layers 0, 1, ...


class VisionTower:
    """The tower of a Hugging Face folder; megatron must not find the parameters of a frozen one."""

    def __init__(
        self, folder: str, hf_config: PretrainedConfig, config: TransformerConfig, *, trained: bool
    ) -> None:
        self._folder, self._hf_config, self._config = folder, hf_config, config
        self.trained = trained
        self._model: torch.nn.Module | None = None
        self._current: ImageFeatures | None = None
        self.cache = FeatureCache()

    def attach(self, chunk: GPTModel) -> None:
        """Let the embedding and the first decoder layers of a chunk use the features."""
        vars(chunk)["vision"] = self  # not a module
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(self._replace)
            if self.trained:
                self._model = chunk.visual = self._new()
        for layer in self.deepstack_layers(chunk):
            add = partial(_add_deepstack, layer.layer_number - 1)
            layer.register_forward_hook(add, with_kwargs=True)

    @property
    def depth(self) -> int:
        """Return how many decoder layers take features of earlier blocks of the tower."""
        return len(getattr(self._hf_config.vision_config, "deepstack_visual_indexes", None) or ())

    def deepstack_layers(self, chunk: GPTModel) -> list[TransformerLayer]:
        return [layer for layer in decoder_layers(chunk) if layer.layer_number <= self.depth]

    def features(self, batch: TrainBatch, length: int) -> ImageFeatures:
        """Return the features of a micro-batch that is padded to `length` tokens on each rank."""
        assert batch.pixel_values is not None
        numbers = self._numbers(batch, length)
        places = (numbers >= 0).nonzero().squeeze(1)
        chosen = self._rows(batch)[numbers[places]]
        dtype = self._config.params_dtype
        if self.trained:
            assert batch.image_grids is not None
            found = run_tower(self._tower(), batch.pixel_values.to(dtype), batch.image_grids)
        else:
            found = self.cache.features(self._tower(), batch, dtype)
        embeddings, *deepstack = found
        self._current = ImageFeatures(
            places=places,
            embeddings=embeddings.index_select(0, chosen),
            deepstack=tuple(layer.index_select(0, chosen) for layer in deepstack),
        )
        return self._current

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters of a frozen tower, which `sleep` offloads to host memory.

        The feature cache is cleared: features are recomputed on demand.
        """
        self.cache.clear()
        return [] if self._model is None or self.trained else list(self._model.parameters())

    def _tower(self) -> torch.nn.Module:
        if self._model is None:
            self._model = self._new().requires_grad_(False)
            reader = HfReader(self._folder)
            for name, weight in self._model.state_dict().items():
                weight.copy_(reader.read(TOWER + name))
        return self._model

    def _new(self) -> torch.nn.Module:
        """Return the tower without its weights; its RoPE stays in fp32."""
        tower = AutoModel.from_config(
            self._hf_config.vision_config, attn_implementation="sdpa", trust_remote_code=False
        )
        for param in tower.parameters():
            param.data = param.data.to(self._config.params_dtype)
            # Each tensor rank has the gradient of its part of the sequence; megatron sums these.
            param.sequence_parallel = self._config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        return tower.to(current_device()).eval()

    def _rows(self, batch: TrainBatch) -> torch.Tensor:
        """Return for each image token of all rows its row in the tower's output."""
        assert batch.image_grids is not None and batch.image_order is not None
        merge = self._hf_config.vision_config.spatial_merge_size**2
        counts = (batch.image_grids.prod(1) // merge).tolist()
        rows = torch.arange(sum(counts), device=batch.tokens.device).split(counts)
        return torch.cat([rows[image] for image in batch.image_order])

    def _numbers(self, batch: TrainBatch, length: int) -> torch.Tensor:
        """Return the number of each token of this rank among all image tokens, or -1: [length]."""
        assert batch.image_mask is not None
        group = context_group()
        whole = join_slices(all_gather(batch.image_mask.int(), group), batch)
        numbers = torch.where(whole > 0, whole.cumsum(0) - 1, -1)
        if group.size() > 1:
            lens = batch.cu_seqlens.diff().cpu().numpy() * group.size()
            index = torch.from_numpy(zigzag_index(lens, group.rank(), group.size()))
            numbers = numbers[index.to(numbers.device)]
        numbers = torch.nn.functional.pad(numbers, (0, length - len(numbers)), value=-1)
        if self._config.sequence_parallel:
            numbers = numbers.chunk(tensor_group().size())[tensor_group().rank()]
        return numbers

    def _zero(self) -> torch.Tensor:
        """Return 0 that depends on every parameter, so that all ranks have a gradient to sum."""
        assert self._model is not None
        return torch.stack([param.flatten()[0] * 0 for param in self._model.parameters()]).sum()

    def _replace(self, _: torch.nn.Module, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
        """Replace the embeddings [S, 1, H] of image tokens: called by the first stage's embedding."""
        found, self._current = self._current, None
        if found is None:
            return embeddings + self._zero() if self.trained else embeddings
        values = found.embeddings.to(embeddings.dtype).unsqueeze(1)
        return embeddings.index_copy(0, found.places, values)


def _add_deepstack(
    number: int, _: torch.nn.Module, __: Any, arguments: dict[str, Any], output: Any
) -> Any:
    """Add the features of one earlier block to the output of a decoder layer.

    Features are passed with the layer's arguments, so a recomputed layer gets its own micro-batch's.
    """
    rows = arguments.get("packed_seq_params")
    found: ImageFeatures | None = None if rows is None else rows.images
    if found is None:
        return output
    hidden, *rest = output
    values = found.deepstack[number].to(hidden.dtype).unsqueeze(1)
    return (hidden.index_add(0, found.places, values), *rest)


def tower_rules(folder: str) -> list[Rule]:
    """Return the rules of a trained tower, whose weights have the same names in both models."""
    with torch.device("meta"):
        tower = AutoModel.from_config(load_hf_config(folder).vision_config, trust_remote_code=False)
    return [Rule(VISUAL + name, (TOWER + name,), Plain()) for name in tower.state_dict()]


def add_images(chunk: Any, batch: TrainBatch, rows: PackedRows, length: int) -> None:
    """Compute the features of a micro-batch's images before its pass through the first chunk.

    Later chunks of the same rank find them in the rows, which all chunks share.
    """
    if chunk.pre_process:
        rows.images = chunk.vision.features(batch, length)
    elif rows.images is None and chunk.vision.deepstack_layers(chunk):
        raise ConfigError(
            "--pipeline-model-parallel-size: the first "
            f"{chunk.vision.depth} decoder layers take features of images and must be on the first stage: "
            "use fewer stages, or more layers in the first"
        )


def attach_tower(args: Args, config: TransformerConfig, chunks: list[GPTModel]) -> None:
    """Attach the tower of a vision-language model to its chunks; a text model has none."""
    if "vision_config" not in json.loads((Path(args.hf_checkpoint) / "config.json").read_text()):
        return
    hf_config = load_hf_config(args.hf_checkpoint)
    tower = VisionTower(args.hf_checkpoint, hf_config, config, trained=trains_tower(args))
    for chunk in chunks:
        tower.attach(chunk)


def refuse_dropped_tower(
    chunks: Sequence[torch.nn.Module], stored: Iterable[str], path: object
) -> None:
    """Raise UserError if a checkpoint has a trained tower and these chunks would use another one."""
    towers: set[Any] = {getattr(chunk, "vision", None) for chunk in chunks} - {None}
    if any(name.startswith(VISUAL) for name in stored) and not any(t.trained for t in towers):
        raise UserError(
            f"{path} was saved with a trained vision tower, and this run would use that of --hf-checkpoint: "
            "add --no-freeze-vision-tower, or convert it to Hugging Face and give that as --hf-checkpoint"
        )


def frozen_tower(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the parameters of a frozen tower, which the chunks' own do not include."""
    towers: set[Any] = {getattr(chunk, "vision", None) for chunk in chunks} - {None}
    return [tensor for tower in towers for tensor in tower.tensors()]
