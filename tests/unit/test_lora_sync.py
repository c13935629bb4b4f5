"""An adapter counts as arrived only if every engine has bound all of it and holds its bits."""

import json
import os
import threading
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.config.lora import LoraConfig
from slime.core.errors import WeightMismatchError, WeightSyncError
from slime.core.types import EngineInfo
from slime.weights.adapter_update import AdapterUpdate
from slime.weights.checksum import format_checksum, tensor_checksum
from slime.weights.ipc import SHM_DIR, import_buffer
from slime.weights.lora_sync import AdapterSync

MODULES = [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "o_proj")]
LORA = LoraConfig(rank=2, alpha=8, target_modules=("q_proj", "o_proj"))


class Engine:
    """Loads adapters as an engine does, and afterwards damages or hides what the test says."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.calls = fault, []
        self.kept: dict[str, dict] = {}  # bodies by layout
        self.formats: list[str] = []
        self.opened: dict[str, torch.Tensor] = {}  # buffers by handle
        self.stack = ExitStack()
        self.held: dict[str, torch.Tensor] = {}
        self.config: dict = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = engine.answer(self.path, body)
                reply = json.dumps(answer).encode()
                self.send_response(200 if answer is not None else 409)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.info = EngineInfo(
            url=f"http://127.0.0.1:{self.server.server_port}", device_ids=("cpu",), kind="slime"
        )

    def answer(self, route: str, body: dict) -> dict | None:
        """Return the reply; None if the adapter has to be sent as a whole."""
        self.calls.append(route)
        if not route.startswith("/load_lora_adapter"):
            return {}
        if self.fault == "refuse":
            return {"success": False, "error_message": "rank 2 is above --max-lora-rank 1"}
        self.formats.append(body.get("load_format", "folder"))
        is_kept = body.get("load_format") == "slime_kept"
        if is_kept and body["layout"] not in self.kept:
            return None
        self._take(route, {**self.kept[body["layout"]], **body} if is_kept else body)
        if self.fault == "bit":
            self.held[next(iter(self.held))][0, 0] += 1
        bound = {name.split("base_model.model.")[1].split(".lora_")[0] for name in self.held}
        if self.fault == "unbound":
            bound.pop()
        names = sorted(self.held)
        joined = torch.cat([self.held[name].flatten() for name in names])
        version = "0" if self.fault == "version" else body["weight_version"]
        shapes = [f"{name} {list(self.held[name].shape)}" for name in names]
        if self.fault == "shape":
            shapes[0] = shapes[0].replace("[", "[1, ")
        return {
            "success": True,
            **({} if is_kept else {"bound_modules": sorted(bound)}),
            "num_modules": len(bound),
            "bound_digest": blake2b("\n".join(shapes).encode(), digest_size=16).hexdigest(),
            "checksum": format_checksum(tensor_checksum("\n".join(names), joined)),
            "weight_version": version,
        }

    def _take(self, route: str, body: dict) -> None:
        if route == "/load_lora_adapter":
            folder = Path(body["lora_path"])
            self.config = json.loads((folder / "adapter_config.json").read_text())
            self.held = load_file(folder / "adapter_model.safetensors")
            return
        self.config = body["config_dict"]
        if "layout" in body:
            self.kept[body["layout"]] = body
        name = json.dumps(body["handle"])
        if name not in self.opened:
            self.opened[name] = self.stack.enter_context(import_buffer(body["handle"]))
        buffer = self.opened[name]
        for row in body["metadata"]:
            dtype, size = getattr(torch, row["dtype"]), torch.Size(row["shape"]).numel()
            part = buffer[row["offset"] : row["offset"] + size * dtype.itemsize]
            self.held[row["name"]] = part.view(dtype).view(row["shape"]).clone()


@contextmanager
def engines(*faults: str):
    made = [Engine(fault) for fault in faults]
    threads = [threading.Thread(target=e.server.serve_forever, daemon=True) for e in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for engine in made:
            engine.server.shutdown()
            engine.server.server_close()
            engine.opened.clear()
            engine.stack.close()


def make_update(dtype: torch.dtype = torch.bfloat16, seed: int = 0):
    torch.manual_seed(seed)
    tensors = []
    for module in MODULES:
        tensors.append((f"{module}.lora_A.weight", torch.randn(2, 24)))
        tensors.append((f"{module}.lora_B.weight", torch.randn(40, 2)))
    return AdapterUpdate(LORA, "/models/base", tensors, dtype), dict(tensors)


@pytest.mark.parametrize("through", ["memory", "files"])
def test_every_engine_gets_the_adapter_and_resumes(through, tmp_path):
    update, tensors = make_update()
    folder = str(tmp_path) if through == "files" else None
    with engines("", "") as (first, second):
        sync = AdapterSync(token=None, folder=folder)
        report = sync.update(update, [first.info, second.info], 7)
    assert report.version == 7 and report.num_engines == 2
    assert report.nbytes == sum(2 * tensor.numel() for tensor in tensors.values())
    for engine in (first, second):
        route = "/load_lora_adapter" + ("" if folder else "_from_tensors")
        assert engine.calls == ["/pause_generation", route, "/continue_generation"]
        assert engine.config["r"] == 2 and engine.config["lora_alpha"] == 8
        assert engine.config["base_model_name_or_path"] == "/models/base"
        for name, tensor in tensors.items():
            assert torch.equal(engine.held[f"base_model.model.{name}"], tensor.bfloat16())


def test_later_updates_send_a_key_instead_of_the_table():
    first, second, third = (make_update(seed=seed) for seed in range(3))
    sync = AdapterSync(token=None)
    with engines("", "") as (lasting, restarted):
        infos = [lasting.info, restarted.info]
        sync.update(first[0], infos, 1)
        restarted.kept.clear()
        sync.update(second[0], infos, 2)
        for engine in (lasting, restarted):  # both get a new buffer
            assert engine.formats == ["slime_shm", "slime_kept", "slime_shm"]
        sync.update(third[0], infos, 3)
        for engine in (lasting, restarted):
            assert engine.formats[-1] == "slime_kept"
            for name, tensor in third[1].items():
                assert torch.equal(engine.held[f"base_model.model.{name}"], tensor.bfloat16())
        wider = make_update(torch.float32)  # another dtype is another buffer
        sync.update(wider[0], infos, 4)
        assert {engine.formats[-1] for engine in (lasting, restarted)} == {"slime_shm"}


@pytest.mark.parametrize("fault", ["unbound", "shape", "bit", "version"])
def test_a_later_update_that_did_not_arrive_is_an_error_too(fault):
    sync = AdapterSync(token=None)
    with engines("") as (engine,):
        sync.update(make_update()[0], [engine.info], 1)
        engine.fault = fault
        with pytest.raises(WeightMismatchError):
            sync.update(make_update(seed=1)[0], [engine.info], 2)
        assert engine.formats[-1] == "slime_kept"
        assert engine.calls.count("/continue_generation") == 1
        engine.fault = ""
        sync.update(make_update(seed=1)[0], [engine.info], 3)
        assert engine.formats[-1] == "slime_shm"  # the buffer was given up


@pytest.mark.parametrize("keep", [True, False])
def test_no_file_is_left_in_shared_memory(keep):
    sync = AdapterSync(token=None, keep_buffer=keep)
    with engines("") as (engine,):
        for version in (1, 2):
            sync.update(make_update()[0], [engine.info], version)
            assert not list(SHM_DIR.glob(f"slime_{os.getpid()}_*"))
    assert engine.formats == ["slime_shm", "slime_kept" if keep else "slime_shm"]
    assert bool(engine.kept) == keep


@pytest.mark.parametrize("update_to", ["all", "the restarted one alone"])
def test_the_exports_of_engines_that_died_are_released(monkeypatch, update_to):
    """A GPU buffer stays allocated until each engine it was exported to has closed it, or is released."""
    released: list[object] = []
    monkeypatch.setattr("slime.weights.adapter_buffer.release_export", released.append)
    sync, update = AdapterSync(token=None), make_update()[0]
    with engines("", "") as (lasting, restarted):
        with engines("") as (dying,):
            sync.update(update, [lasting.info, restarted.info, dying.info], 1)
            handle = next(iter(lasting.kept.values()))["handle"]
        if update_to == "all":
            with pytest.raises(WeightSyncError, match="pausing the engines"):
                sync.update(update, [lasting.info, restarted.info, dying.info], 2)
            assert released == [handle]  # the two that answer close theirs
        else:
            restarted.kept.clear()
            sync.update(update, [restarted.info], 1)
            assert released == [handle] * 2  # nothing is lost for the one that this update omits


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("refuse", WeightSyncError, "above --max-lora-rank 1"),
        ("unbound", WeightMismatchError, "3 of 4 modules are bound; unbound: model.layers."),
        ("shape", WeightMismatchError, "names or shapes differ"),
        ("bit", WeightMismatchError, "checksum"),
        ("version", WeightMismatchError, "it reports version 0"),
    ],
)
def test_an_adapter_that_did_not_arrive_leaves_the_engines_paused(fault, error, words):
    update, _ = make_update()
    with engines("", fault) as (good, bad):
        with pytest.raises(error) as found:
            AdapterSync(token=None).update(update, [good.info, bad.info], 3)
        assert words in str(found.value)
        assert bad.info.url in str(found.value) and good.info.url not in str(found.value)
        for engine in (good, bad):
            assert "/continue_generation" not in engine.calls
