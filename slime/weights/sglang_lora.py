"""Adapters for SGLang servers, through the routes by which SGLang loads and unloads adapters itself.

    pause (abort) ─▶ unload ─▶ load, with the SHA-256 of every tensor ─▶ set the version ─▶ flush

A server cannot replace an adapter in place, and unloads one only when no request uses it: requests are aborted,
and the rollout resends them with the tokens generated so far. What is verified: each rank of the server compares
the SHA-256 of what it received (except from a folder, which it reads itself), the server's options show that
every module has slots, and the probe after the update shows that it applies the adapter.

SGLang fuses q, k and v, and gate and up, and drops a part whose partners are missing: they are sent as zeros.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.config.checks.file_checks import weight_shapes
from slime.config.peft_files import CONFIG_FILE, LORA_A, LORA_B, PEFT_PREFIX
from slime.core.errors import WeightMismatchError, WeightSyncError
from slime.utils.concurrency import call_all
from slime.weights.buckets import NamedTensor
from slime.weights.engine_client import EngineClient, transfer_timeout_s
from slime.weights.peft_folder import write_peft_folder
from slime.weights.sglang_transport import serialize
from slime.weights.transport import naming

if TYPE_CHECKING:
    from slime.weights.adapter_update import AdapterUpdate

logger = logging.getLogger(__name__)

_FIRST_WITH_CHECKSUMS = (0, 5, 23)  # older servers ignore `expected_checksums`
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_WHOLE = {part: whole for whole, parts in _FUSED.items() for part in parts}


class SGLangAdapters:
    """One version of an adapter for servers that are paused; `shared`: through memory of this node."""

    def __init__(
        self, adapter: AdapterUpdate, version: int, *, folder: Path | None, shared: bool
    ) -> None:
        self._adapter, self._version = adapter, version
        self._folder, self._shared = folder, shared
        tensors = complete_tensors(adapter)
        self._config = sglang_config(adapter, tensors)
        self._host = {PEFT_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors}
        if folder is not None:
            write_peft_folder(str(folder), adapter.lora, adapter.base, tensors)
            (folder / CONFIG_FILE).write_text(json.dumps(self._config, indent=2))

    def load(self, engines: list[EngineClient]) -> None:
        """Replace the adapter of every server; raise unless each reports it and the version."""
        payload = None
        if self._folder is None and not self._shared:
            payload = base64.b64encode(pickle.dumps(self._host)).decode()
        call_all(engines, lambda engine: self._load_one(engine, payload))

    def _load_one(self, engine: EngineClient, payload: str | None) -> None:
        name = self._adapter.name
        with naming(f"adapter {name}", engine):
            self._check_server(engine)
            if name in _loaded(engine):
                engine.update("/unload_lora_adapter", {"lora_name": name})
            body, route = self._body(engine, payload)
            timeout = transfer_timeout_s(self._adapter.nbytes)
            reply = engine.update(route, {"lora_name": name, **body}, timeout=timeout)
            version = {"new_version": str(self._version), "abort_all_requests": False}
            engine.update("/update_weight_version", version)
            held = engine.start_commit(with_checksums=False)()
        if name not in (reply.get("loaded_adapters") or {}):
            raise WeightMismatchError(f"engine {engine.url} does not report {name}: {reply}")
        if held.version != str(self._version):
            raise WeightMismatchError(
                f"adapter {self._version} was sent, but {engine.url} reports {held.version!r}"
            )

    def _body(self, engine: EngineClient, payload: str | None) -> tuple[dict[str, Any], str]:
        if self._folder is not None:
            return {"lora_path": str(self._folder.resolve())}, "/load_lora_adapter"
        ranks = range(len(engine.info.device_ids))
        body = {
            "config_dict": self._config,
            "serialized_named_tensors": [payload or serialize(self._host) for _ in ranks],
            "expected_checksums": {name: _sha256(tensor) for name, tensor in self._host.items()},
        }
        return body, "/load_lora_adapter_from_tensors"

    def _check_server(self, engine: EngineClient) -> None:
        """Refuse a server that would drop part of the adapter; warn if it compares no checksums."""
        server, adapter = engine.get("/server_info"), self._adapter
        if not server.get("enable_lora"):
            raise WeightSyncError(
                f"engine {engine.url} serves no adapters: start it with --enable-lora"
            )
        rank = server.get("max_lora_rank") or 0
        if rank < adapter.lora.rank:
            raise WeightSyncError(
                f"engine {engine.url} has slots of rank {rank}: start it with --max-lora-rank "
                f"{adapter.lora.rank}"
            )
        missing = unserved_modules(adapter.modules, server.get("lora_target_modules") or ())
        if missing:
            raise WeightMismatchError(
                f"engine {engine.url} has no slots for {len(missing)} of {len(adapter.modules)} modules, "
                f"such as {missing[0]}: add {missing[0].rpartition('.')[2]} to --lora-target-modules"
            )
        if self._folder is None and _version_of(server) < _FIRST_WITH_CHECKSUMS:
            logger.warning(
                "SGLang %s at %s does not compare checksums of adapters; the probe alone shows that it "
                "applies them",
                server.get("version"),
                engine.url,
            )


def sglang_config(adapter: AdapterUpdate, tensors: list[NamedTensor]) -> dict[str, Any]:
    """Return adapter_config.json for SGLang, which ignores use_rslora: alpha / r has to be the scaling."""
    modules = {name.removesuffix(LORA_A) for name, _ in tensors if name.endswith(LORA_A)}
    return {
        **adapter.peft_config,
        "lora_alpha": adapter.lora.scaling * adapter.lora.rank,
        "use_rslora": False,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }


def complete_tensors(adapter: AdapterUpdate) -> list[NamedTensor]:
    """Return the adapter with zeros for missing parts of fused modules, in the shapes of the base."""
    known, missing = set(adapter.modules), []
    for module in adapter.modules:
        prefix, _, last = module.rpartition(".")
        whole = _WHOLE.get(last, "")  # a gate_up_proj of the model itself has all its parts
        partners = [f"{prefix}.{part}" for part in _FUSED.get(whole, ())]
        missing += [one for one in partners if one not in known and one not in missing]
    if not missing:
        return adapter.tensors
    shapes, like = weight_shapes(adapter.base), adapter.tensors[0][1]
    zeros: list[NamedTensor] = []
    for module in missing:
        rows, columns = shapes[f"{module}.weight"]
        zeros.append((module + LORA_A, like.new_zeros(adapter.lora.rank, columns)))
        zeros.append((module + LORA_B, like.new_zeros(rows, adapter.lora.rank)))
    return [*adapter.tensors, *zeros]


def unserved_modules(modules: Iterable[str], targets: Iterable[str]) -> list[str]:
    """Return the modules without slots on a server of these --lora-target-modules."""
    served = {_fused(target.rpartition(".")[2]) for target in targets}
    if "all" in served:
        return []
    return sorted(module for module in modules if _fused(module.rpartition(".")[2]) not in served)


def _fused(name: str) -> str:
    return _WHOLE.get(name, name)


def _loaded(engine: EngineClient) -> set[str]:
    return {str(model.get("id")) for model in engine.get("/v1/models").get("data", ())}


def _version_of(server: dict[str, Any]) -> tuple[int, ...]:
    parts = str(server.get("version") or "").split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
