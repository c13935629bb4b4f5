"""Control routes: abort, pause, cache, weights, memory. Bodies and replies are SGLang's."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from aiohttp import web

from slime.engine.engine import Engine
from slime.engine.kv_cache import TAGS
from slime.engine.lora.in_place import KeptBuffer, LayoutUnknown
from slime.engine.lora.store import Adapter, AdapterStore
from slime.engine.scheduler.sampling_params import RequestError
from slime.engine.server.threads import DaemonCall
from slime.engine.weights import TensorMeta, metadata_in_order, parse_metadata
from slime.utils.http_guard import Refused
from slime.weights.checksum import format_checksum

T = TypeVar("T")
Body = dict[str, Any]
Route = Callable[[Engine, Body], Awaitable[Any]]
Loader = Callable[[AdapterStore, str, str], Adapter]  # (store, name, version)
PAUSE_MODES = ("abort", "retract", "in_place")
_FLUSH_POLL = 0.05


async def abort_request(engine: Engine, body: Body) -> web.Response:
    rid, everything = _get(body, "rid", str, ""), _get(body, "abort_all", bool, False)
    if everything:
        await _call(engine, lambda: engine.abort(lambda request: True))
    elif rid:
        # A batch's requests are named <rid>_0, <rid>_1, ...
        await _call(
            engine, lambda: engine.abort(lambda r: r.rid == rid or r.rid.startswith(f"{rid}_"))
        )
    return web.Response()


async def pause_generation(engine: Engine, body: Body) -> Body:
    mode = _get(body, "mode", str, "abort")
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    await _call(engine, lambda: engine.pause(mode))
    return {"message": "Generation paused successfully.", "status": "ok"}


async def continue_generation(engine: Engine, body: Body) -> Body:
    await _call(engine, engine.resume)
    return {"message": "Generation continued successfully.", "status": "ok"}


async def flush_cache(engine: Engine, body: Body) -> web.Response:
    deadline = time.monotonic() + _seconds(body.get("timeout", 0.0))
    while not await _call(engine, engine.flush_cache):
        if time.monotonic() >= deadline:
            return web.Response(text="Flush cache failed.\n", status=400)
        await asyncio.sleep(_FLUSH_POLL)
    return web.Response(text="Cache flushed.\n")


async def begin_weight_update(engine: Engine, body: Body) -> Body:
    return await _reported(_call(engine, engine.weights.begin_session))


async def end_weight_update(engine: Engine, body: Body) -> Body:
    return await _reported(_call(engine, engine.weights.end_session))


async def update_weights_from_disk(engine: Engine, body: Body) -> Body:
    path = _get(body, "model_path", str)

    def update() -> None:
        engine.weights.update_from_disk(path)
        engine.model_path = path

    reply = await _update(engine, body, update)
    return {**reply, "num_paused_requests": engine.in_flight if engine.pause_mode else 0}


async def update_weights_from_tensor(engine: Engine, body: Body) -> Body:
    load_format = body.get("load_format")
    if load_format != "slime_shm":
        raise RequestError(
            'this engine takes no pickled tensors: send load_format "slime_shm" with `handle` and `metadata`'
        )
    metas = parse_metadata(body.get("metadata"))

    def update() -> None:
        engine.weights.require_session("update_weights_from_tensor")
        engine.weights.update_from_buffer(body.get("handle"), metas)

    return await _update(engine, body, update)


async def init_weights_update_group(engine: Engine, body: Body) -> Body:
    options: dict[str, Any] = {
        "address": _get(body, "master_address", str),
        "port": _get(body, "master_port", int),
        "rank": _get(body, "rank_offset", int),
        "world_size": _get(body, "world_size", int),
        "name": _get(body, "group_name", str, "weight_update_group"),
        "backend": _get(body, "backend", str, "nccl"),
    }
    # Joining may block forever: on a daemon thread it blocks neither the engine nor the process's exit.
    join = DaemonCall(lambda: engine.weights.init_group(**options), "init-weights-group")
    return await _reported(join.future)


async def destroy_weights_update_group(engine: Engine, body: Body) -> Body:
    name = _get(body, "group_name", str, "weight_update_group")
    return await _reported(_call(engine, lambda: engine.weights.destroy_group(name)))


async def update_weights_from_distributed(engine: Engine, body: Body) -> Body:
    load_format = body.get("load_format")
    if load_format not in (None, "flattened_bucket"):
        raise RequestError(f"load_format must be null or flattened_bucket, got {load_format!r}")
    metas, group = _broadcast(body)

    def update() -> None:
        engine.weights.require_session("update_weights_from_distributed")
        engine.weights.update_from_group(metas, group, flattened=load_format is not None)

    return await _update(engine, body, update)


async def update_weight_version(engine: Engine, body: Body) -> Body:
    version = str(_get(body, "new_version", object))

    def update() -> None:
        if _get(body, "abort_all_requests", bool, True):
            engine.abort(lambda request: True)
        engine.weight_version = version

    return {**await _reported(_call(engine, update)), "new_version": version}


async def load_lora_adapter(engine: Engine, body: Body) -> Body:
    path = _get(body, "lora_path", str)

    def load(store: AdapterStore, name: str, version: str) -> Adapter:
        return store.load_folder(name, path, version)

    return await _load_adapter(engine, body, load)


async def load_lora_adapter_from_tensors(engine: Engine, body: Body) -> Body:
    """Load an adapter from shared memory or a broadcast, or update it from a buffer that is still open."""
    loaders = {"slime_shm": _from_buffer, "slime_kept": _from_kept, "slime_group": _from_group}
    load_format = _get(body, "load_format", str, "")
    if load_format not in loaders:
        raise RequestError(
            'this engine takes no pickled tensors: send load_format "slime_shm" with `handle` and '
            '`metadata`, or "slime_group" with `names`, `dtypes`, `shapes` and `group_name`'
        )
    named = load_format != "slime_kept"
    return await _load_adapter(engine, body, loaders[load_format](engine, body), named=named)


def _from_buffer(engine: Engine, body: Body) -> Loader:
    """Load from shared memory; with `layout` the buffer stays open for later "slime_kept" updates."""
    config, layout = _get(body, "config_dict", dict), _get(body, "layout", str, "")
    metas, handle = parse_metadata(body.get("metadata")), body.get("handle")

    def load(store: AdapterStore, name: str, version: str) -> Adapter:
        if layout:
            buffer = KeptBuffer(layout, handle, metas, engine.runner.device)
            return store.load_kept(name, config, buffer, version)
        return store.load_tensors(name, config, engine.weights.read_buffer(handle, metas), version)

    return load


def _from_kept(engine: Engine, body: Body) -> Loader:
    layout = _get(body, "layout", str)

    def load(store: AdapterStore, name: str, version: str) -> Adapter:
        try:
            return store.update_in_place(name, layout, version)
        except LayoutUnknown as error:
            raise Refused(409, f"{error}: send the whole adapter") from None

    return load


def _from_group(engine: Engine, body: Body) -> Loader:
    config, (metas, group) = _get(body, "config_dict", dict), _broadcast(body)

    def load(store: AdapterStore, name: str, version: str) -> Adapter:
        return store.load_tensors(name, config, engine.weights.read_group(metas, group), version)

    return load


async def unload_lora_adapter(engine: Engine, body: Body) -> Body:
    name = _get(body, "lora_name", str)
    return await _lora_reply(
        engine, _call(engine, lambda: engine.unload_adapter(name), exclusive=True)
    )


async def _load_adapter(engine: Engine, body: Body, load: Loader, *, named: bool = True) -> Body:
    """Load a new adapter immediately; replace a loaded one only while no request runs or while paused.

    The reply lists the bound modules if `named`, else only their number and a digest.
    """
    name, version = _get(body, "lora_name", str), body.get("weight_version")
    if body.get("added_tokens_config") or body.get("expected_checksums"):
        raise RequestError(
            "`added_tokens_config` and `expected_checksums` are not supported; compare the checksum in "
            "the reply"
        )
    store = engine.lora
    if store is None:
        raise RequestError("start the engine with --enable-lora")

    def run() -> Body:
        engine.require_memory("weights")
        adapter = load(store, name, engine.weight_version if version is None else str(version))
        names = {"bound_modules": list(adapter.modules)} if named else {}
        return {**names, **store.report(adapter)}

    def run_if_new() -> Body | None:
        # In the engine thread: another load of this name may have run since the request arrived.
        return None if name in store.adapters else run()

    async def load_or_replace() -> Body:
        reply = None if name in store.adapters else await _call(engine, run_if_new)
        return await _call(engine, run, exclusive=True) if reply is None else reply

    return await _lora_reply(engine, load_or_replace())


async def _lora_reply(engine: Engine, work: Awaitable[Body | None]) -> Body:
    reply: Body = {"success": True, "error_message": None}
    try:
        reply |= await work or {}
    except (RequestError, RuntimeError) as error:
        reply = {"success": False, "error_message": str(error)}
    adapters = {} if engine.lora is None else engine.lora.adapters
    loaded = {name: adapter.path for name, adapter in adapters.items()}
    return {**reply, "loaded_adapters": loaded}


async def weights_checker(engine: Engine, body: Body) -> Body:
    """Return the checksums of the weights or, with `lora_name`, of what an adapter's slot holds."""
    action, name = _get(body, "action", str, "checksum"), _get(body, "lora_name", str, "")
    if action != "checksum":
        raise RequestError(f"action must be checksum, got {action!r}")
    if name:
        engine.find_adapter(name)
    lora = engine.lora
    sums = await _call(
        engine, lambda: lora.checksums(name) if lora and name else engine.weights.checksums()
    )
    # Checksums are additive: the engine's is the sum of its tensors'.
    total = format_checksum(sum(sums.values()) % 2**64)
    rank = {
        "checksums": {name: format_checksum(value) for name, value in sums.items()},
        "per_gpu_checksum": total,
        "parallelism_info": {"tp_rank": 0, "tp_size": 1},
    }
    return {"success": True, "message": "", "ranks": [rank], "per_engine_checksum": total}


async def release_memory_occupation(engine: Engine, body: Body) -> None:
    tags = _tags(body)
    await _call(engine, lambda: engine.release_memory(tags))


async def resume_memory_occupation(engine: Engine, body: Body) -> None:
    tags = _tags(body)
    await _call(engine, lambda: engine.resume_memory(tags))


CONTROL_ROUTES: dict[str, tuple[tuple[str, ...], Route]] = {
    "/abort_request": (("POST",), abort_request),
    "/pause_generation": (("POST",), pause_generation),
    "/continue_generation": (("POST",), continue_generation),
    "/flush_cache": (("GET", "POST"), flush_cache),
    "/begin_weight_update": (("POST",), begin_weight_update),
    "/end_weight_update": (("POST",), end_weight_update),
    "/update_weights_from_disk": (("POST",), update_weights_from_disk),
    "/update_weights_from_tensor": (("POST",), update_weights_from_tensor),
    "/init_weights_update_group": (("POST",), init_weights_update_group),
    "/destroy_weights_update_group": (("POST",), destroy_weights_update_group),
    "/update_weights_from_distributed": (("POST",), update_weights_from_distributed),
    "/update_weight_version": (("POST",), update_weight_version),
    "/load_lora_adapter": (("POST",), load_lora_adapter),
    "/load_lora_adapter_from_tensors": (("POST",), load_lora_adapter_from_tensors),
    "/unload_lora_adapter": (("POST",), unload_lora_adapter),
    "/weights_checker": (("GET", "POST"), weights_checker),
    "/release_memory_occupation": (("GET", "POST"), release_memory_occupation),
    "/resume_memory_occupation": (("GET", "POST"), resume_memory_occupation),
}


async def _call(engine: Engine, function: Callable[[], T], *, exclusive: bool = False) -> T:
    return await asyncio.wrap_future(engine.call(function, exclusive=exclusive))


async def _reported(work: Awaitable[None]) -> Body:
    """Await the work and return the reply of the weight routes, {"success", "message"}."""
    try:
        await work
    except (RequestError, RuntimeError) as error:
        return {"success": False, "message": str(error)}
    return {"success": True, "message": "Success."}


async def _update(engine: Engine, body: Body, function: Callable[[], None]) -> Body:
    version = body.get("weight_version")
    version = None if version is None else str(version)
    if _get(body, "abort_all_requests", bool, False):
        await _call(engine, lambda: engine.abort(lambda request: True))

    def update() -> None:
        engine.require_memory("weights")
        try:
            function()
        finally:
            engine.weights_changed()
        if version is not None:
            engine.weight_version = version

    reply = await _reported(_call(engine, update, exclusive=True))
    if reply["success"] and version is not None:
        reply["message"] += f" Weight version updated to {version}."
    return reply


def _broadcast(body: Body) -> tuple[list[TensorMeta], str]:
    """Return the tensors of a broadcast, and the name of its process group."""
    lists = (_get(body, name, list) for name in ("names", "dtypes", "shapes"))
    return metadata_in_order(*lists), _get(body, "group_name", str, "weight_update_group")


def _seconds(value: Any) -> float:
    with suppress(TypeError, ValueError):
        if math.isfinite(seconds := float(value)):
            return seconds
    raise RequestError(f"`timeout` must be a number of seconds, got {value!r}")


def _tags(body: Body) -> list[str]:
    tags = body.get("tags")
    tags = list(TAGS) if tags is None else tags
    if not isinstance(tags, list) or any(tag not in TAGS for tag in tags):
        raise RequestError(f"tags must be null or a list of {', '.join(TAGS)}, got {tags!r}")
    return tags


_REQUIRED = object()


def _get(body: Body, name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = body.get(name)
    if value is None:
        if default is _REQUIRED:
            raise RequestError(f"`{name}` is missing")
        return default
    if not isinstance(value, kind):
        raise RequestError(f"`{name}` must be of type {kind.__name__}, got {value!r}")
    return value
