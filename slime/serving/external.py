"""External engines: servers that the user runs, checked before training and used like our own."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.config.arguments import Args
from slime.config.engine_groups import DEFAULT_MODEL
from slime.core.errors import UserError
from slime.core.types import EngineInfo, ModelAddress
from slime.data.tokenizer import load_tokenizer
from slime.serving.router import external_router_url
from slime.serving.servers import answers, health_route
from slime.utils.addresses import engine_url, port_of
from slime.utils.concurrency import call_all
from slime.utils.engine_keys import remember_key
from slime.utils.sync_http import HttpError, get_json, post_json

_TIMEOUT_S = 60.0
_TEXT = "The 3 Äpfel cost 4.50 €, {x: [1, 2]}\n\tdef f(): return None"
_SIZES = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "moe_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "vocab_size"),
)
_OPTION = "--rollout-external-engine-addrs"
_UNKNOWN_SERVER = _OPTION + " {url}: this is a server, but not SGLang's or slime's"


def find_external(args: Args) -> list[EngineInfo]:
    """Return the engines of --rollout-external-engine-addrs; raise UserError for an unsuitable one."""
    urls = [engine_url(address) for address in args.rollout_external_engine_addrs or ()]
    found = [_find(args, url) for url in urls]
    _check_all_differ(urls)
    return found


def _find(args: Args, url: str) -> EngineInfo:
    try:
        model = get_json(f"{url}/model_info", timeout=_TIMEOUT_S)
        server = get_json(f"{url}/server_info", timeout=_TIMEOUT_S)
    except HttpError as error:
        if error.status is None:
            raise UserError(f"{_OPTION} {url}: no engine answers there ({error})") from error
        if error.status in (401, 403):
            raise UserError(
                f"{_OPTION} {url}: the engine requires its API key: set SLIME_ENGINE_TOKEN to it"
            ) from error
        raise UserError(_UNKNOWN_SERVER.format(url=url)) from error
    if not (isinstance(model, dict) and isinstance(server, dict) and "weight_version" in model):
        raise UserError(_UNKNOWN_SERVER.format(url=url))
    _check_model(args, url, model)
    _check_tokenizer(args, url)
    ranks = server.get("tp_size", 1) * server.get("pp_size", 1)
    kind = "slime" if server.get("engine") == "slime" else "sglang"
    if kind == "sglang" and args.multimodal_keys and (missing := missing_image_options(server)):
        raise UserError(
            f"{_OPTION} {url} sees other pixels or positions in images than the trainer: start it "
            f"with {' '.join(missing)}"
        )
    version = str(server.get("version", "unknown"))
    return EngineInfo(url=url, device_ids=(f"elsewhere:{url}",) * ranks, kind=kind, version=version)


def missing_image_options(server: dict[str, Any]) -> list[str]:
    """Return the options without which SGLang reads images differently; `server` is its /server_info."""
    pil = (
        server.get("disable_fast_image_processor") or server.get("image_processor_backend") == "pil"
    )
    precise = server.get("enable_precise_embedding_interpolation")
    return [
        *([] if pil else ["--disable-fast-image-processor"]),
        *([] if precise else ["--enable-precise-embedding-interpolation"]),
    ]


def version_warning(engines: list[EngineInfo]) -> str | None:
    """Return a warning if versions differ, since their results differ slightly."""
    versions = {f"{engine.kind} {engine.version}" for engine in engines}
    if len(versions) < 2:
        return None
    where = ", ".join(f"{e.url} is {e.kind} {e.version}" for e in engines)
    return f"warning: the engines have {len(versions)} versions ({where}): use one version for all"


def _check_all_differ(urls: list[str]) -> None:
    """Refuse two addresses of one server: it would join a weight update twice and deadlock."""
    seen: dict[tuple[Any, ...], str] = {}
    for url in urls:
        parts = urlsplit(url)
        for place in {info[4] for info in socket.getaddrinfo(parts.hostname, port_of(parts))}:
            if seen.setdefault(place, url) != url:
                raise UserError(
                    f"{_OPTION}: {seen[place]} and {url} are the same engine: list it once"
                )


def _check_model(args: Args, url: str, model: dict[str, Any]) -> None:
    config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    if not model.get("is_generation", True):
        raise UserError(f"{_OPTION} {url}: {model['model_path']} does not generate text")
    served = {**_config_of(model["model_path"]), **model}
    for key in ("architectures", "model_type", *_SIZES):
        local, remote = config.get(key), served.get(key)
        if local and remote and local != remote:
            raise UserError(
                f"{_OPTION} {url} serves {model['model_path']} with {key} {remote}, but --hf-checkpoint "
                f"{args.hf_checkpoint} has {local}: start it with the model that is trained"
            )


def _config_of(model_path: str) -> dict[str, Any]:
    """Return the model's config if this machine has its folder: servers do not report a model's sizes."""
    with suppress(OSError, ValueError):
        return json.loads((Path(model_path) / "config.json").read_text())
    return {}


def _check_tokenizer(args: Args, url: str) -> None:
    """Compare the engine's tokens of a text with those of --hf-checkpoint's tokenizer."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    body = {
        "text": _TEXT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    try:
        reply = post_json(f"{url}/generate", body, timeout=_TIMEOUT_S)
    except HttpError as error:
        raise UserError(f"{_OPTION} {url} does not generate: {error}") from error
    try:
        remote = [entry[1] for entry in reply["meta_info"]["input_token_logprobs"]]
    except (KeyError, TypeError) as error:
        raise UserError(_UNKNOWN_SERVER.format(url=url)) from error
    if remote != list(tokenizer.encode(_TEXT)):
        raise UserError(
            f"{_OPTION} {url} has another tokenizer than --hf-checkpoint {args.hf_checkpoint}: start it "
            "with the model that is trained"
        )


class ExternalGroup:
    """Engines that this run neither starts nor stops; unresponsive ones are skipped until they answer.

    It has the interface of `slime.ray.engine_group.EngineGroup`.
    """

    def __init__(self, args: Args, *, token: str):
        self.args, self.token = args, token
        self.unsynced: list[EngineInfo] = []
        self.all: list[EngineInfo] = []
        self._unresponsive: set[int] = set()

    def start(self) -> None:
        """Do nothing: external engines are already running."""

    def wait(self, notify: Callable[[str], None] = lambda text: None) -> None:
        remember_key(map(engine_url, self.args.rollout_external_engine_addrs or ()), self.token)
        self.all = find_external(self.args)
        for info in self.all:
            notify(f"{info.kind} engine at {info.url} (version {info.version})")
        if warning := version_warning(self.all):
            notify(warning)

    def last_log_lines(self) -> str:
        """Return "": external engines have no log here."""
        return ""

    @property
    def count(self) -> int:
        return len(self.all)

    def members(self) -> list[Any]:
        """Return no processes: external engines do not belong to this run."""
        return []

    @property
    def infos(self) -> list[EngineInfo]:
        return [info for index, info in enumerate(self.all) if index not in self._unresponsive]

    @property
    def serving(self) -> list[EngineInfo]:
        return self.infos

    def failed(self, *, paused: bool = False) -> list[int]:
        timeout, route = self.args.rollout_health_check_timeout, health_route(paused)
        healthy = call_all(self.all, lambda info: answers(info.url, timeout, route))
        return [i for i, ok in enumerate(healthy) if not ok or i in self._unresponsive]

    def restart(self, index: int, notify: Callable[[str], None] = lambda text: None) -> str:
        """Skip an engine that does not answer, or include it again once it does."""
        info = self.all[index]
        self.unsynced = [other for other in self.unsynced if other != info]
        # A failed update may have left it paused.
        route = health_route(paused=index in self._unresponsive)
        if not answers(info.url, self.args.rollout_health_check_timeout, route):
            self._unresponsive.add(index)
            return f"the engine at {info.url} does not answer; continuing without it"
        self._unresponsive.discard(index)
        self.unsynced.append(info)
        return f"the engine at {info.url} answers again"

    def admit(self) -> None:
        """Record that all engines have the current weights."""
        self.unsynced = []

    def route(self, engines: list[EngineInfo]) -> dict[str, ModelAddress]:
        """Return the engines, and the router of --sglang-router-ip, whose workers they already are."""
        router = external_router_url(self.args)
        remember_key([router] if router else [], self.token)
        return {DEFAULT_MODEL: ModelAddress(urls=[info.url for info in engines], router=router)}

    def router_lost(self) -> bool:
        return False

    def release(self) -> None:
        """Do nothing: this run does not manage the memory of external engines."""

    def resume(self, tag: str) -> None: ...

    def abort_requests(self) -> None: ...

    def stop(self) -> None:
        self.all, self.unsynced = [], []
