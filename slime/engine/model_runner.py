"""Loads the Hugging Face model and runs forwards of scheduled work through it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from slime.engine.arguments import EngineArgs
from slime.engine.attention import IMPLEMENTATION, record_layers, use_plan
from slime.engine.batch import ForwardBatch, make_batch, make_fixed_batches
from slime.engine.dense_cache import DenseCache
from slime.engine.kv_cache import KVCache, LayerShape
from slime.engine.request import Request
from slime.engine.sampling import Draw, sample
from slime.engine.scheduler import Work
from slime.utils.device import device_type
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

_DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
_FIXED_ROWS = 32  # rows of every forward in deterministic mode
_SCORE_ROWS = 512  # prompt log-probs computed at a time


@dataclass(kw_only=True, eq=False)
class StepOutput:
    """The tokens drawn in one step, row i for `works[i]`, and the log-probs of prompt tokens."""

    works: list[Work]
    draw: Draw
    scored: list[tuple[Request, float]]


class ModelRunner:
    """The model on its device. `layers` says what each layer stores in the KV cache."""

    def __init__(self, args: EngineArgs) -> None:
        self.device = torch.device(args.device or device_type())
        config = load_config(args)
        self.dtype = _choose_dtype(args.dtype, config, self.device)
        self.model = _load_model(args, config, self.dtype, self.device)
        self.deterministic = args.enable_deterministic_inference
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.context_len: int = args.context_length or _context_len(self.model)
        self.layers = self._find_layers()
        self.cache: KVCache | None = None
        self.dense: DenseCache | None = None

    def make_cache(self, num_pages: int, page_size: int) -> None:
        self.cache = KVCache(self.layers, num_pages, page_size, self.dtype, self.device)
        if self.device.type == "cpu" and not self.deterministic:
            self.dense = DenseCache(self.cache, max_tokens=num_pages * page_size)

    @torch.inference_mode()
    def run(self, works: list[Work], page_table: np.ndarray) -> StepOutput:
        """One step: compute the tokens of all works and draw the next token where one is due."""
        assert self.cache is not None
        if self.deterministic:
            parts = [
                self._forward(b)
                for b in make_fixed_batches(works, page_table, self.cache, _FIXED_ROWS)
            ]
            return _join(parts)
        return self._forward(make_batch(works, page_table, self.cache, self.dense))

    def _forward(self, batch: ForwardBatch) -> StepOutput:
        num_samples, num_scores = len(batch.sample_rows), len(batch.score_rows)
        rows = np.concatenate([batch.sample_rows, batch.score_rows])
        if self.deterministic:  # the output layer, too, sees the same number of rows every time
            rows = np.resize(rows, -(-len(rows) // _FIXED_ROWS) * _FIXED_ROWS or _FIXED_ROWS)
        with use_plan(batch.plan):
            logits = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=torch.from_numpy(rows).to(self.device),
            ).logits[0]
        requests = [work.request for work in batch.sample_works]
        draw = sample(logits[:num_samples], requests) if requests else Draw(tokens=[], log_probs=[])
        scored = (
            self._score(logits[num_samples : num_samples + num_scores], batch) if num_scores else []
        )
        return StepOutput(works=batch.sample_works, draw=draw, scored=scored)

    def _score(self, logits: torch.Tensor, batch: ForwardBatch) -> list[tuple[Request, float]]:
        positions = batch.positions[0].cpu().numpy()[batch.score_rows].tolist()
        owners = [work.request for work in batch.score_works]
        targets = [r.token_ids[p + 1] for r, p in zip(owners, positions, strict=True)]
        values: list[float] = []
        for start in range(0, len(targets), _SCORE_ROWS):
            part = logits[start : start + _SCORE_ROWS].float()
            index = torch.tensor(
                targets[start : start + _SCORE_ROWS], device=part.device
            ).unsqueeze(1)
            values += torch.log_softmax(part, dim=-1).gather(1, index).squeeze(1).tolist()
        return list(zip(owners, values, strict=True))

    @torch.inference_mode()
    def _find_layers(self) -> dict[int, LayerShape]:
        """Run one token with attention that only takes notes: works for any model definition."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with record_layers() as layers:
            self.model(input_ids=token, position_ids=token, use_cache=False)
        if not layers:
            raise UserError(
                f"the embedded engine cannot serve {type(self.model).__name__}: its attention does not "
                "go through transformers' attention interface; use --rollout-engine sglang"
            )
        return layers


def load_config(args: EngineArgs):
    path = Path(args.model_path)
    if not path.is_dir():
        raise UserError(f"--model-path {args.model_path}: no such folder")
    if not (path / "config.json").is_file():
        raise UserError(
            f"--model-path {args.model_path}: no config.json in it, so no Hugging Face model"
        )
    config = AutoConfig.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    kinds = {"full_attention", "sliding_attention"}
    layer_types = set(getattr(config, "layer_types", None) or kinds)
    if config.is_encoder_decoder or (
        type(config) not in AutoModelForCausalLM._model_mapping and not args.trust_remote_code
    ):
        raise UserError(
            f"--model-path {args.model_path}: {config.model_type!r} is not a causal language model; "
            "the embedded engine serves those that AutoModelForCausalLM loads"
        )
    if layer_types - kinds:
        raise UserError(
            f"--model-path {args.model_path}: layers of kind {sorted(layer_types - kinds)} keep a state "
            "that the embedded engine's KV cache does not hold; use --rollout-engine sglang"
        )
    return config


def eos_token_ids(model: PreTrainedModel, tokenizer_eos: int | None) -> frozenset[int]:
    """Tokens that end a response: the generation config's, else the model's, and the tokenizer's."""
    generation: GenerationConfig | None = model.generation_config  # type: ignore[assignment]
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = model.config.get_text_config().eos_token_id
    ids = set(found if isinstance(found, list) else [found]) | {tokenizer_eos}
    return frozenset(token for token in ids if token is not None)


def _load_model(
    args: EngineArgs, config, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    options = {
        "dtype": dtype,
        "attn_implementation": IMPLEMENTATION,
        "trust_remote_code": args.trust_remote_code,
    }
    if args.enable_deterministic_inference:
        # Each token's experts as products of their own: a loop over experts has shapes that depend
        # on where all the tokens of a batch go.
        options["experts_implementation"] = "batched_mm"
    if args.load_format == "dummy":
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model_path, **options)
    model = cast(PreTrainedModel, model)
    torch.nn.Module.to(model, device)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if device.type == "cpu":
        _lay_out_by_columns(model)
    return model


def _lay_out_by_columns(model: PreTrainedModel) -> None:
    """Keep matrices as x @ W.T reads them: up to twice as fast with few rows. Shapes stay the same."""
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not embedding:
            module.weight.data = module.weight.data.t().contiguous().t()


def _choose_dtype(name: str, config, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    dtype = getattr(config, "dtype", None) or torch.float32
    if dtype == torch.float32 and device.type == "cuda":
        return torch.bfloat16
    return dtype


def _context_len(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096


def _join(parts: list[StepOutput]) -> StepOutput:
    return StepOutput(
        works=[work for part in parts for work in part.works],
        draw=Draw(
            tokens=[token for part in parts for token in part.draw.tokens],
            log_probs=[value for part in parts for value in part.draw.log_probs],
        ),
        scored=[entry for part in parts for entry in part.scored],
    )
