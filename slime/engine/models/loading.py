"""Loads a checkpoint folder as a model on its device, or raises UserError with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from slime.config.checks.file_checks import check_weights, weight_names
from slime.config.checks.model_types import (
    VISION,
    check_delta_net,
    has_linear_attention,
    in_tower,
)
from slime.core.errors import UserError
from slime.data.tokenizer import load_renamed_config
from slime.engine.arguments import EngineArgs
from slime.engine.models.attention import IMPLEMENTATION
from slime.weights.fp8 import load_causal_lm

_DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_SERVED_AS = {"mimo": "qwen2"}  # the same layers; its extra MTP layer is not used to generate
_DEFAULT_CONTEXT = 4096  # of models without max_position_embeddings


def load_model(args: EngineArgs, device: torch.device) -> PreTrainedModel:
    """Load the model in evaluation mode, with attention over the engine's KV cache."""
    config = _load_config(args)
    options: dict[str, Any] = {
        "dtype": _choose_dtype(args.dtype, config, device),
        "attn_implementation": IMPLEMENTATION,
        "trust_remote_code": args.trust_remote_code,
    }
    auto: Any = AutoModelForCausalLM
    if _takes_images(args, config):
        auto = AutoModelForImageTextToText
        options["attn_implementation"] = {"text_config": IMPLEMENTATION, "vision_config": "sdpa"}
    if args.enable_deterministic_inference:
        # One matmul per token and expert: a loop over experts has shapes that depend on the routing of
        # all tokens of the batch.
        options["experts_implementation"] = "batched_mm"
    model = _make_model(args, config, auto, options, device)
    torch.nn.Module.to(model, device)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if device.type == "cpu":
        _store_column_major(model)
    return model


def _make_model(
    args: EngineArgs,
    config: PreTrainedConfig,
    auto: Any,
    options: dict[str, Any],
    device: torch.device,
) -> PreTrainedModel:
    try:
        if args.load_format != "dummy":
            return _load_weights(args, config, auto, options)
        with torch.device(device):
            return cast(PreTrainedModel, auto.from_config(config, **options))
    except KeyError as error:  # in the model's table of attention implementations
        if error.args != (IMPLEMENTATION,):
            raise
        raise UserError(
            f"the embedded engine cannot serve {config.model_type!r}: its attention does not go through "
            "transformers' attention interface; use --rollout-engine sglang"
        ) from error


def _takes_images(args: EngineArgs, config: PreTrainedConfig) -> bool:
    """Return whether to load the vision tower: Qwen3.5 also has checkpoints without one."""
    if config.model_type not in VISION:
        return False
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return True
    stored = args.load_format == "dummy" or any(
        in_tower(name) for name in weight_names(args.model_path, "--model-path")
    )
    return stored and (Path(args.model_path) / "preprocessor_config.json").is_file()


def eos_token_ids(model: PreTrainedModel, tokenizer_eos: int | None) -> frozenset[int]:
    """Return the tokens that end a response: the generation config's, else the model's, and the tokenizer's."""
    generation: GenerationConfig | None = model.generation_config  # type: ignore[assignment]
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    ids = set(found if isinstance(found, list) else [found]) | {tokenizer_eos}
    return frozenset(token for token in ids if token is not None)


def context_len(args: EngineArgs, model: PreTrainedModel) -> int:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if args.context_length is not None and most is not None and args.context_length > most:
        raise UserError(
            f"--context-length {args.context_length} is more than the {most} positions of the model; "
            "remove it or lower it"
        )
    chosen = args.context_length or most or _DEFAULT_CONTEXT
    short = _longrope_limit(model)
    if short is not None and chosen > short:
        raise UserError(
            f"{type(model).__name__} has longrope, which changes the RoPE of a whole text once it has more than "
            f"{short} tokens; the embedded engine cannot serve short and long texts together: add "
            f"--context-length {short} (for a run --sglang-context-length {short}), or use "
            "--rollout-engine sglang"
        )
    return chosen


def _longrope_limit(model: PreTrainedModel) -> int | None:
    """Return the maximum length with longrope's short factors; None for models without longrope."""
    config: Any = model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(value for value in given.values() if isinstance(value, dict))):
        if rope.get("rope_type") == "longrope":
            limit = rope.get("original_max_position_embeddings")
            return limit or config.original_max_position_embeddings
    return None


def _load_config(args: EngineArgs) -> PreTrainedConfig:
    path = Path(args.model_path)
    if not path.is_dir():
        raise UserError(f"--model-path: {path} does not exist")
    if not (path / "config.json").is_file():
        raise UserError(
            f"--model-path: {path} has no config.json, so it is not a Hugging Face model"
        )
    try:
        config = load_renamed_config(path, _SERVED_AS) or AutoConfig.from_pretrained(
            path, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise UserError(f"--model-path {path}: {_first_line(error)}") from error
    known = type(config) in AutoModelForCausalLM._model_mapping or args.trust_remote_code
    known = known or config.model_type in VISION
    if config.is_encoder_decoder or not known:
        raise UserError(
            f"--model-path {path}: {config.model_type!r} is not a causal language model; the embedded "
            "engine serves those that AutoModelForCausalLM loads"
        )
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS
    if has_linear_attention(text.model_type):
        check_delta_net(text.to_dict())
        others.discard("linear_attention")
    if others:
        raise UserError(
            f"--model-path {path}: the embedded engine does not support layers of kind {sorted(others)}; "
            "use --rollout-engine sglang"
        )
    return config


def _load_weights(
    args: EngineArgs, config: PreTrainedConfig, auto: Any, options: dict[str, Any]
) -> PreTrainedModel:
    """Load the weights; a missing tensor is an error, where transformers would initialize it at random.

    FP8 weights are dequantized: the engine computes in the requested dtype.
    """
    check_weights(args.model_path, "--model-path")
    try:
        model, report = load_causal_lm(
            args.model_path, config, auto=auto, output_loading_info=True, **options
        )
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"--model-path {args.model_path}: {_first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"--model-path {args.model_path}: its weights do not match its config.json; "
            f"{len(missing)} tensors are missing, such as {missing[0]}"
        )
    return model


def _store_column_major(model: PreTrainedModel) -> None:
    """Store the weights of linears column-major: x @ W.T is up to twice as fast with few rows."""
    embedding = model.get_input_embeddings().weight
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight is not embedding:
            module.weight.data = module.weight.data.t().contiguous().t()


def _choose_dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    dtype = getattr(config.get_text_config(), "dtype", None) or torch.float32
    if dtype == torch.float32 and device.type == "cuda":
        return torch.bfloat16
    return dtype


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
