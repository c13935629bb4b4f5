"""Servers somebody else runs: found by their addresses, and checked before any training."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.config.arguments import Args
from slime.core.errors import UserError
from slime.core.types import EngineInfo
from slime.data.tokenizer import load_tokenizer
from slime.utils.sync_http import HttpError, get_json, post_json

_TIMEOUT_S = 60.0
_SPELLING = "The 3 Äpfel cost 4.50 €, {x: [1, 2]}\n\tdef f(): return None"
_SIZES = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "vocab_size"),
)
_OPTION = "--rollout-external-engine-addrs"
_OF_ANOTHER_KIND = _OPTION + " {url}: this is a server, but not SGLang's or slime's"


def find_external(args: Args) -> list[EngineInfo]:
    urls = [normalise(address) for address in args.rollout_external_engine_addrs or ()]
    found = [_find(args, url) for url in urls]
    _check_all_differ(urls)
    return found


def normalise(address: str) -> str:
    """10.0.0.1:30000 and http://10.0.0.1:30000/ are the same."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _find(args: Args, url: str) -> EngineInfo:
    try:
        model = get_json(f"{url}/model_info", timeout=_TIMEOUT_S)
        server = get_json(f"{url}/server_info", timeout=_TIMEOUT_S)
    except HttpError as error:
        if error.status is None:
            raise UserError(f"{_OPTION} {url}: no engine answers there ({error})") from error
        if error.status in (401, 403):
            raise UserError(
                f"{_OPTION} {url}: the engine wants its key: set SLIME_ENGINE_TOKEN to it"
            ) from error
        raise UserError(_OF_ANOTHER_KIND.format(url=url)) from error
    if not isinstance(model, dict) or "weight_version" not in model:
        raise UserError(_OF_ANOTHER_KIND.format(url=url))
    _check_model(args, url, model)
    _check_tokenizer(args, url)
    ranks = server.get("tp_size", 1) * server.get("pp_size", 1)
    kind = "slime" if server.get("engine") == "slime" else "sglang"
    version = str(server.get("version", "unknown"))
    return EngineInfo(url=url, device_ids=(f"elsewhere:{url}",) * ranks, kind=kind, version=version)


def version_warning(engines: list[EngineInfo]) -> str | None:
    """Two versions do not compute quite the same; None where all are alike."""
    versions = {f"{engine.kind} {engine.version}" for engine in engines}
    if len(versions) < 2:
        return None
    where = ", ".join(f"{e.url} is {e.kind} {e.version}" for e in engines)
    return f"warning: the engines are of {len(versions)} versions ({where}): start them with the same one"


def _check_all_differ(urls: list[str]) -> None:
    """Two names of one server: it would be asked to join a weight update twice, and wait for itself."""
    seen: dict[tuple[Any, ...], str] = {}
    for url in urls:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        for place in {info[4] for info in socket.getaddrinfo(parts.hostname, port)}:
            if seen.setdefault(place, url) != url:
                raise UserError(
                    f"{_OPTION}: {seen[place]} and {url} are the same engine: name it once"
                )


def _check_model(args: Args, url: str, model: dict[str, Any]) -> None:
    config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    if not model.get("is_generation", True):
        raise UserError(f"{_OPTION} {url}: {model['model_path']} does not generate text")
    there_too = {**_config_of(model["model_path"]), **model}
    for key in ("architectures", "model_type", *_SIZES):
        here, there = config.get(key), there_too.get(key)
        if here and there and here != there:
            raise UserError(
                f"{_OPTION} {url} serves {model['model_path']} with {key} {there}, but --hf-checkpoint "
                f"{args.hf_checkpoint} has {here}: start it with the model that is trained"
            )


def _config_of(model_path: str) -> dict[str, Any]:
    """Servers do not tell a model's sizes: they are known where its folder is on this machine too."""
    with suppress(OSError, ValueError):
        return json.loads((Path(model_path) / "config.json").read_text())
    return {}


def _check_tokenizer(args: Args, url: str) -> None:
    """The engine is given a text, and says which tokens it made of it."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    body = {
        "text": _SPELLING,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    try:
        reply = post_json(f"{url}/generate", body, timeout=_TIMEOUT_S)
    except HttpError as error:
        raise UserError(f"{_OPTION} {url} does not generate: {error}") from error
    try:
        there = [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]]
    except (KeyError, TypeError) as error:
        raise UserError(_OF_ANOTHER_KIND.format(url=url)) from error
    if there != list(tokenizer.encode(_SPELLING)):
        raise UserError(
            f"{_OPTION} {url} has another tokenizer than --hf-checkpoint {args.hf_checkpoint}: start it "
            "with the tokenizer of the model that is trained"
        )
