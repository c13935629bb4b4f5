"""Adapters of a running server: routes, choice by request, versions, checksums and refusals."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from slime.utils.sync_http import HttpError, post_json
from slime.weights.checksum import format_checksum, tensor_checksum
from slime.weights.ipc import SharedBuffer
from slime.weights.process_group import destroy_side_group, init_side_group, serve_store
from tests.adapters import ALL, make_adapter, peft_log_probs
from tests.engines import LONG_CONTEXT, ROOM, EngineServer, engine_server
from tests.tiny import make_tiny_checkpoint
from tests.waiting import wait_for

PROMPT = [(7 * i + 5) % 250 for i in range(24)]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
NUM_MODULES = 2 * len(ALL)  # of two layers


class Made:
    def __init__(self, root: Path) -> None:
        self.base = make_tiny_checkpoint(
            root / "base", weight_scale=3.0, max_position_embeddings=LONG_CONTEXT
        )
        self.folders = {
            name: make_adapter(self.base, root / name, seed=seed)
            for seed, name in enumerate(["first", "second"])
        }


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def server(made: Made):
    options = ["--lora-path", f"first={made.folders['first']}", "--max-loras-per-batch", "2"]
    with engine_server(made.base, "--weight-version", "0", *options, *ROOM) as server:
        yield server


@pytest.fixture(autouse=True)
def start_from_the_first(server: EngineServer, made: Made):
    server.post("/continue_generation")
    for name in server.state["lora_adapters"]:
        server.post("/unload_lora_adapter", {"lora_name": name})
    load(server, "first", made.folders["first"], weight_version="0")


def load(server: EngineServer, name: str, folder: Path, **body):
    return server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), **body})


def pack(folder: Path) -> tuple[SharedBuffer, list[dict]]:
    """Return an adapter end to end in shared memory, and the table of what is where."""
    tensors = load_file(folder / "adapter_model.safetensors")
    metadata, offset = [], 0
    for key in sorted(tensors):
        shape = list(tensors[key].shape)
        metadata.append({"name": key, "dtype": "float32", "shape": shape, "offset": offset})
        offset += tensors[key].nbytes
    buffer = SharedBuffer(offset)
    fill(buffer, folder)
    return buffer, metadata


def fill(buffer: SharedBuffer, folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    buffer.tensor.copy_(
        torch.cat([tensors[n].flatten() for n in sorted(tensors)]).view(torch.uint8)
    )


def send(server: EngineServer, name: str, folder: Path, **body):
    """Send an adapter through shared memory, as a trainer of this machine does."""
    buffer, metadata = pack(folder)
    try:
        return send_buffer(server, name, folder, buffer, metadata, **body)
    finally:
        buffer.close()


def send_buffer(
    server: EngineServer, name: str, folder: Path, buffer: SharedBuffer, metadata: list, **body
):
    message = {
        "lora_name": name,
        "config_dict": json.loads((folder / "adapter_config.json").read_text()),
        "load_format": "slime_shm",
        "handle": buffer.export(),
        "metadata": metadata,
        **body,
    }
    return server.post("/load_lora_adapter_from_tensors", message)


def send_key(server: EngineServer, name: str, layout: str, **body):
    """Let the engine copy a buffer that it keeps open."""
    message = {"lora_name": name, "load_format": "slime_kept", "layout": layout, **body}
    return server.post("/load_lora_adapter_from_tensors", message)


def generate(server: EngineServer, name: str | None, **body):
    asked = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
    return server.post("/generate", {**asked, "logprob_start_len": 0, "lora_path": name, **body})


def assert_served(made: Made, reply, folder: Path | None) -> None:
    meta = reply["meta_info"]
    found = [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    expected = peft_log_probs(made.base, folder, [*PROMPT, *reply["output_ids"]])
    torch.testing.assert_close(torch.tensor(found), expected, atol=2e-4, rtol=2e-4)


def refused(call, *words: str) -> None:
    with pytest.raises(HttpError) as error:
        call()
    assert error.value.status == 400
    for word in words:
        assert word in str(error.value)


def file_checksums(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: format_checksum(tensor_checksum(name, t)) for name, t in tensors.items()}


def checksums(server: EngineServer, name: str) -> dict[str, str]:
    reply = server.post("/weights_checker", {"action": "checksum", "lora_name": name})
    return reply["ranks"][0]["checksums"]


def test_a_request_chooses_its_adapter(server: EngineServer, made: Made):
    load(server, "second", made.folders["second"])
    names = [None, "first", "second", "first"]
    replies = generate(server, None, input_ids=[PROMPT] * 4, lora_path=names)
    for reply, name in zip(replies, names, strict=True):
        assert_served(made, reply, made.folders.get(str(name)))
    assert replies[1]["output_ids"] == replies[3]["output_ids"] != replies[0]["output_ids"]


def test_openai_routes_choose_by_the_model(server: EngineServer, made: Made):
    expected = {name: generate(server, name)["text"] for name in (None, "first")}
    assert expected[None] != expected["first"]
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}

    def ask(**body) -> str:
        return server.post("/v1/completions", {**asked, **body})["choices"][0]["text"]

    base = str(made.base)
    for model in ("first", f"{base}:first", "anything:first"):
        assert ask(model=model) == expected["first"]
    assert ask(model=base, lora_path="first") == expected["first"]
    assert ask(model=base) == ask(model="gpt") == expected[None]
    refused(lambda: ask(model=f"{base}:unknown"), "unknown", "first")
    listed = server.get("/v1/models")["data"]
    assert [(entry["id"], entry.get("parent")) for entry in listed] == [
        (base, None),
        ("first", base),
    ]


def test_unknown_names_are_refused(server: EngineServer):
    refused(lambda: generate(server, "nobody"), "nobody", "first")
    refused(lambda: generate(server, None, lora_path=["first", "first"]), "lora_path")
    refused(lambda: generate(server, None, lora_path=7), "lora_path")
    refused(lambda: server.post("/unload_lora_adapter", {"lora_name": "nobody"}), "nobody")


def test_the_reply_says_what_is_bound_and_its_checksum(server: EngineServer, made: Made):
    folder = made.folders["second"]
    reply = load(server, "second", folder, weight_version="7")
    expected = file_checksums(folder)
    assert {f"base_model.model.{module}.lora_{side}.weight" for side in "AB" for module in reply["bound_modules"]} == expected.keys()  # fmt: skip
    assert len(reply["bound_modules"]) == NUM_MODULES
    assert checksums(server, "second") == expected
    stored = load_file(folder / "adapter_model.safetensors")
    joined = torch.cat([stored[name].flatten() for name in sorted(stored)])
    total = tensor_checksum("\n".join(sorted(stored)), joined)
    assert reply["checksum"] == format_checksum(total)
    assert reply["loaded_adapters"] == {n: str(path) for n, path in made.folders.items()}
    assert server.state["lora_adapters"]["second"]["version"] == "7"


def test_an_adapter_sent_through_shared_memory(server: EngineServer, made: Made):
    folder = made.folders["second"]
    reply = send(server, "sent", folder, weight_version="3")
    assert reply["success"] and len(reply["bound_modules"]) == NUM_MODULES
    assert checksums(server, "sent") == file_checksums(folder)
    found = generate(server, "sent")
    assert_served(made, found, folder)
    assert found["meta_info"]["weight_version"] == "3"
    assert [span["version"] for span in found["meta_info"]["weight_versions"]] == ["3"]
    assert generate(server, None)["meta_info"]["weight_version"] == "0"


@pytest.fixture
def kept(server: EngineServer, made: Made):
    """The first adapter, loaded as "kept" from a buffer that both sides keep."""
    folder = made.folders["first"]
    buffer, metadata = pack(folder)
    options = {"layout": "one", "weight_version": "1"}
    reply = send_buffer(server, "kept", folder, buffer, metadata, **options)
    assert reply["success"] and len(reply["bound_modules"]) == reply["num_modules"] == NUM_MODULES
    yield buffer
    buffer.close()


def unknown(call) -> None:
    with pytest.raises(HttpError) as error:
        call()
    assert error.value.status == 409


def test_an_update_from_a_buffer_that_is_kept(server: EngineServer, made: Made, kept: SharedBuffer):
    whole = load(server, "first", made.folders["second"])  # what a reply must say of it
    assert_served(made, generate(server, "kept"), made.folders["first"])
    for version, name in (("2", "second"), ("3", "first"), ("4", "second")):
        fill(kept, made.folders[name])
        reply = send_key(server, "kept", "one", weight_version=version)
        assert reply["num_modules"] == NUM_MODULES and reply["weight_version"] == version
        assert reply["bound_digest"] == whole["bound_digest"] and "bound_modules" not in reply
        assert checksums(server, "kept") == file_checksums(made.folders[name])
        found = generate(server, "kept")
        assert_served(made, found, made.folders[name])
        assert [span["version"] for span in found["meta_info"]["weight_versions"]] == [version]
    assert reply["checksum"] == whole["checksum"]


@pytest.mark.parametrize("event", ["unloaded", "loaded from files", "memory released", "other key"])
def test_a_buffer_is_kept_no_longer_than_its_slot(
    server: EngineServer, made: Made, kept: SharedBuffer, event: str
):
    assert send_key(server, "kept", "one")["success"]
    if event == "unloaded":
        server.post("/unload_lora_adapter", {"lora_name": "kept"})
    elif event == "loaded from files":
        load(server, "kept", made.folders["second"], weight_version="7")
    elif event == "memory released":
        server.post("/release_memory_occupation", {"tags": ["weights"]})
        refused(lambda: send_key(server, "kept", "one"), "released")
        server.post("/resume_memory_occupation", {"tags": ["weights"]})
    unknown(lambda: send_key(server, "kept", "two" if event == "other key" else "one"))
    unknown(lambda: send_key(server, "first", "one"))
    if event == "loaded from files":
        assert checksums(server, "kept") == file_checksums(made.folders["second"])
        assert server.state["lora_adapters"]["kept"]["version"] == "7"


def test_tables_of_buffers_that_cannot_be_kept_are_refused(server: EngineServer, made: Made):
    folder = made.folders["second"]
    buffer, metadata = pack(folder)
    before = checksums(server, "first")
    shifted = [{**metadata[0], "offset": 4}, *metadata[1:]]
    bare = [
        {**entry, "name": entry["name"].removeprefix("base_model.model.")} for entry in metadata
    ]
    half = [{**metadata[0], "dtype": "float16"}, *metadata[1:]]
    swapped = _renumbered([*metadata[1:], metadata[0]])
    wrong = {
        "contiguous": shifted,
        "dtype": half,
        "sorted by name": swapped,
        "base_model.model.": bare,
    }
    for word, table in wrong.items():
        refused(
            lambda table=table: send_buffer(server, "first", folder, buffer, table, layout="x"),
            word,
        )
    short = SharedBuffer(64)
    refused(lambda: send_buffer(server, "first", folder, short, metadata, layout="x"), "outside")
    buffer.close()
    short.close()
    assert checksums(server, "first") == before


def _renumbered(metadata: list[dict]) -> list[dict]:
    table, offset = [], 0
    for entry in metadata:
        table.append({**entry, "offset": offset})
        offset += 4 * torch.Size(entry["shape"]).numel()
    return table


def test_an_adapter_broadcast_to_the_engine(server: EngineServer, made: Made):
    tensors = load_file(made.folders["second"] / "adapter_model.safetensors")
    store, url = serve_store("127.0.0.1", 2)
    host, port = url.removeprefix("tcp://").rsplit(":", 1)
    with ThreadPoolExecutor(1) as pool:
        join = {"master_address": host, "master_port": int(port), "rank_offset": 1}
        join |= {"world_size": 2, "group_name": "lora", "backend": "gloo"}
        joined = pool.submit(server.post, "/init_weights_update_group", join)
        group = init_side_group(url, 0, 2, "gloo", "lora", store=store)
        assert joined.result()["success"]
        body = {
            "lora_name": "sent",
            "config_dict": json.loads((made.folders["second"] / "adapter_config.json").read_text()),
            "load_format": "slime_group",
            "names": list(tensors),
            "dtypes": ["float32"] * len(tensors),
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": "lora",
        }
        received = pool.submit(server.post, "/load_lora_adapter_from_tensors", body)
        flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()])
        dist.broadcast(flat, group=group, group_src=0)
        assert received.result()["success"]
        assert server.post("/destroy_weights_update_group", {"group_name": "lora"})["success"]
        destroy_side_group(group)
    assert checksums(server, "sent") == file_checksums(made.folders["second"])
    assert_served(made, generate(server, "sent"), made.folders["second"])


def test_an_update_while_requests_run_stamps_each_token(server: EngineServer, made: Made):
    """Paused in place, updated, continued: the tokens before are of version 0, those after of 1."""
    long = {"temperature": 0, "max_new_tokens": LONG_CONTEXT - 100, "ignore_eos": True}
    asked = {"input_ids": PROMPT, "sampling_params": long}
    with server.under_way({**asked, "lora_path": "first"}, asked) as calls:
        server.post("/pause_generation", {"mode": "in_place"})
        assert send(server, "first", made.folders["second"], weight_version="1")["success"]
        steps = server.state["num_steps"]
        server.post("/continue_generation")
        wait_for(lambda: server.state["num_steps"] >= steps + 20)
        server.post("/abort_request", {"abort_all": True})
        adapted, base = (call.result(60) for call in calls)
    spans = adapted["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "1"]
    assert spans[0]["end"] == spans[1]["start"] > 0
    assert [span["version"] for span in base["meta_info"]["weight_versions"]] == ["0"]
    # The tokens after the update are those of the new adapter over the whole text before them.
    assert_served(made, generate(server, "first"), made.folders["second"])


def test_an_adapter_in_use_is_not_unloaded(server: EngineServer):
    long = {"max_new_tokens": LONG_CONTEXT - 100, "ignore_eos": True}
    with server.under_way({"input_ids": PROMPT, "sampling_params": long, "lora_path": "first"}):
        server.post("/pause_generation", {"mode": "in_place"})
        refused(lambda: server.post("/unload_lora_adapter", {"lora_name": "first"}), "1 requests")
        server.post("/continue_generation")
    assert server.post("/unload_lora_adapter", {"lora_name": "first"})["loaded_adapters"] == {}


def test_slots_are_limited_and_reused(server: EngineServer, made: Made):
    load(server, "second", made.folders["second"])
    refused(lambda: load(server, "third", made.folders["second"]), "--max-loras-per-batch")
    server.post("/unload_lora_adapter", {"lora_name": "first"})
    load(server, "third", made.folders["first"])
    assert_served(made, generate(server, "third"), made.folders["first"])


def test_control_routes_need_the_key(server: EngineServer):
    for route in ("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"):
        with pytest.raises(HttpError) as error:
            post_json(f"{server.url}{route}", {"lora_name": "x"}, token="wrong")
        assert error.value.status == 401


def changed(folder: Path, target: Path, *, config=None, tensors=None) -> Path:
    """Copy an adapter with changes to its config and to its tensors by name (None removes one)."""
    target.mkdir()
    given = json.loads((folder / "adapter_config.json").read_text()) | (config or {})
    (target / "adapter_config.json").write_text(json.dumps(given))
    stored = load_file(folder / "adapter_model.safetensors") | (tensors or {})
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, target / "adapter_model.safetensors")
    return target


LAYER = "base_model.model.model.layers.0"
A, B = f"{LAYER}.self_attn.q_proj.lora_A.weight", f"{LAYER}.self_attn.q_proj.lora_B.weight"
WRONG = {
    "DoRA": ({"use_dora": True}, {}, "use_dora"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    "bias": ({"bias": "lora_only"}, {}, "bias"),
    "rank pattern": ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern"),
    "expert parameters": ({"target_parameters": ["experts.up"]}, {}, "experts.up"),
    "something new": ({"use_tomorrow": True}, {}, "use_tomorrow"),
    "PiSSA": ({"init_lora_weights": "pissa"}, {}, "pissa"),
    "not LoRA": ({"peft_type": "IA3"}, {}, "IA3"),
    "no rank": ({"r": 0}, {}, "r must be"),
    "huge alpha": ({"lora_alpha": 10**400}, {}, "lora_alpha must be a number"),
    "other rank": ({"r": 2}, {}, "shape"),
    "rank too large": ({"r": 128}, {}, "--max-lora-rank 128"),
    "other base": ({}, {A: torch.zeros(4, 32)}, "q_proj.lora_A"),
    "bound to nothing": (
        {},
        {A.replace("q_proj", "wq"): torch.zeros(4, 64), B.replace("q_proj", "wq"): torch.zeros(64, 4)},
        "1 of 15 modules bind to nothing",
    ),
    "half of a pair": ({}, {B: None}, B),
    "module of a target missing": ({}, {A: None, B: None}, "'q_proj' is not complete"),
    "target without matrices": ({"target_modules": [*ALL, "gate"]}, {}, "'gate'"),
    "other tensor": ({}, {f"{LAYER}.mlp.up_proj.lora_magnitude_vector": torch.zeros(2, 2)}, "magnitude"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_adapters_are_refused_and_leave_the_old(
    server: EngineServer, made: Made, tmp_path: Path, case: str
):
    config, tensors, word = WRONG[case]
    before = checksums(server, "first")
    folder = changed(made.folders["second"], tmp_path / "a", config=config, tensors=tensors)
    refused(lambda: load(server, "first", folder), word)
    assert checksums(server, "first") == before
    assert server.state["lora_adapters"]["first"]["version"] == "0"


def test_files_that_cannot_be_read(server: EngineServer, made: Made, tmp_path: Path):
    refused(lambda: load(server, "x", tmp_path / "missing"), "adapter_config.json")
    folder = changed(made.folders["first"], tmp_path / "a")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(lambda: load(server, "x", folder), "cannot be read")
    path.rename(folder / "adapter_model.bin")
    refused(lambda: load(server, "x", folder), "pickle")
    pickled = {"lora_name": "x", "config_dict": {}, "serialized_named_tensors": ["gASV"]}
    refused(lambda: server.post("/load_lora_adapter_from_tensors", pickled), "pickle")
