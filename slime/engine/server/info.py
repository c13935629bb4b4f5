"""What the engine tells about itself: /model_info, /server_info, /v1/models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import slime
from slime.engine.engine import Engine


def model_info(engine: Engine) -> dict[str, Any]:
    config = engine.runner.model.config
    return {
        "model_path": engine.model_path,
        "served_model_name": engine.args.served_model_name or engine.model_path,
        "tokenizer_path": engine.args.tokenizer_path or engine.args.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.weight_version,
        "load_format": engine.args.load_format,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": config.architectures,
    }


def server_info(engine: Engine) -> dict[str, Any]:
    scheduler, sizes = engine.scheduler, engine.sizes
    page_size = engine.args.page_size
    state = {
        "num_running_reqs": len(scheduler.running),
        "num_waiting_reqs": len(scheduler.waiting),
        "num_used_tokens": (sizes.num_pages - scheduler.pool.num_available) * page_size,
        "num_cached_pages": len(scheduler.cache),
        "num_retracted_reqs": scheduler.num_retracted,
        "num_steps": engine.num_steps,
        "paused": engine.pause_mode,
        "released": sorted(engine.released),
        "weight_version": engine.weight_version,
    }
    options = dataclasses.asdict(engine.args)
    del options["api_key"]
    return {
        **options,
        "engine": "slime",
        "version": slime.__version__,
        "dtype": str(engine.runner.dtype).removeprefix("torch."),
        "device": str(engine.runner.device),
        "context_length": engine.runner.context_len,
        "max_running_requests": sizes.max_running,
        "max_total_num_tokens": sizes.num_pages * page_size,
        "chunked_prefill_size": sizes.chunk_size,
        "internal_states": [state],
    }


def models(engine: Engine) -> dict[str, Any]:
    name = engine.args.served_model_name or engine.model_path
    entry = {
        "id": name,
        "object": "model",
        "owned_by": "slime",
        "root": engine.model_path,
        "max_model_len": engine.runner.context_len,
    }
    return {"object": "list", "data": [entry]}


INFO_ROUTES: dict[str, Callable[[Engine], dict[str, Any]]] = {
    "/model_info": model_info,
    "/get_model_info": model_info,
    "/server_info": server_info,
    "/get_server_info": server_info,
    "/v1/models": models,
}
