"""Weight updates of a running engine in all three ways, their rules, versions and checksums."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams
from slime.utils.sync_http import HttpError, post_json
from slime.weights.buckets import hf_views
from slime.weights.checksum import format_checksum, tensor_checksum
from slime.weights.ipc import SharedBuffer
from slime.weights.process_group import destroy_side_group, init_side_group, serve_store
from tests.engines import (
    LONG_CONTEXT,
    ROOM,
    TOKEN,
    EngineServer,
    engine_server,
    local_engine,
)
from tests.tiny import make_tiny_checkpoint, module_weights
from tests.waiting import wait_for

PROMPT = [5, 6, 7, 8]
FAMILIES = ["qwen3", "qwen3_moe"]
ENDLESS = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": LONG_CONTEXT - 100, "ignore_eos": True},
}


class Policy:
    """A checkpoint and what Hugging Face makes of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model = AutoModelForCausalLM.from_pretrained(path)
        self.tensors = dict(hf_views(module_weights(model), model_type=model.config.model_type))
        prompt = torch.tensor([PROMPT])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
        )
        self.output = out[0, len(PROMPT) :].tolist()

    def checksums(self) -> dict[str, str]:
        return {name: format_checksum(tensor_checksum(name, t)) for name, t in self.tensors.items()}


@pytest.fixture(scope="module", params=FAMILIES)
def policies(request, tmp_path_factory) -> list[Policy]:
    root = tmp_path_factory.mktemp(request.param)
    folders = [root / "0", root / "1"]
    for seed, path in enumerate(folders):
        make_tiny_checkpoint(path, request.param, seed=seed, max_position_embeddings=LONG_CONTEXT)
    return [Policy(path) for path in folders]


@pytest.fixture(scope="module")
def server(policies: list[Policy]):
    with engine_server(policies[0].path, "--weight-version", "0", *ROOM) as server:
        yield server


@pytest.fixture(autouse=True)
def start_from_the_first(server: EngineServer, policies: list[Policy]):
    server.post("/continue_generation")
    body = {"model_path": str(policies[0].path), "weight_version": "0"}
    assert server.post("/update_weights_from_disk", body)["success"]


def output(server: EngineServer) -> list[int]:
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    return post_json(f"{server.url}/generate", body)["output_ids"]


def checksums(server: EngineServer) -> dict[str, str]:
    return server.post("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]


def pack(tensors: dict[str, torch.Tensor]) -> tuple[SharedBuffer, list[dict]]:
    metadata, offset = [], 0
    for name, tensor in tensors.items():
        metadata.append(
            {"name": name, "dtype": "float32", "shape": list(tensor.shape), "offset": offset}
        )
        offset += -(-tensor.nbytes // 64) * 64
    buffer = SharedBuffer(offset)
    for entry, tensor in zip(metadata, tensors.values(), strict=True):
        data = tensor.contiguous().view(-1).view(torch.uint8)
        buffer.tensor[entry["offset"] : entry["offset"] + data.numel()] = data
    return buffer, metadata


def send(server: EngineServer, tensors: dict[str, torch.Tensor], **body):
    buffer, metadata = pack(tensors)
    try:
        message = {
            "load_format": "slime_shm",
            "handle": buffer.export(),
            "metadata": metadata,
            **body,
        }
        return server.post("/update_weights_from_tensor", message)
    finally:
        buffer.close()


def assert_serves(server: EngineServer, policy: Policy, version: str) -> None:
    assert checksums(server) == policy.checksums()
    assert output(server) == policy.output
    assert server.get("/model_info")["weight_version"] == version


def test_from_disk(server: EngineServer, policies: list[Policy]):
    assert_serves(server, policies[0], "0")
    reply = server.post(
        "/update_weights_from_disk", {"model_path": str(policies[1].path), "weight_version": "1"}
    )
    assert reply["success"] and reply["message"].endswith("Weight version updated to 1.")
    assert_serves(server, policies[1], "1")
    assert server.get("/model_info")["model_path"] == str(policies[1].path)


def test_from_shared_memory_in_buckets(server: EngineServer, policies: list[Policy]):
    names = list(policies[1].tensors)
    server.post("/begin_weight_update")
    for part in (names[::2], names[1::2]):
        assert send(server, {name: policies[1].tensors[name] for name in part})["success"]
    server.post("/end_weight_update")
    server.post("/update_weight_version", {"new_version": "2"})
    assert_serves(server, policies[1], "2")


def test_a_shared_buffer_stays_open_for_its_session_only(
    server: EngineServer, policies: list[Policy]
):
    maps = Path(f"/proc/{server.pid}/maps")
    name = "model.norm.weight"
    server.post("/begin_weight_update")
    buffer, metadata = pack({name: policies[0].tensors[name]})
    body = {"load_format": "slime_shm", "handle": buffer.export(), "metadata": metadata}
    server.post("/update_weights_from_tensor", body)
    assert body["handle"]["name"] in maps.read_text()
    flat = policies[1].tensors[name].view(torch.uint8)
    buffer.tensor[: flat.numel()] = flat  # what is written later is what comes
    server.post("/update_weights_from_tensor", body)
    assert checksums(server)[name] == policies[1].checksums()[name]
    server.post("/end_weight_update")
    assert body["handle"]["name"] not in maps.read_text()
    buffer.close()


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_from_a_process_group(
    server: EngineServer, policies: list[Policy], load_format: str | None
):
    store, url = serve_store("127.0.0.1", 2)
    group_name = f"group_{load_format}"
    host, port = url.removeprefix("tcp://").rsplit(":", 1)
    tensors = policies[1].tensors
    with ThreadPoolExecutor() as pool:
        body = {
            "master_address": host,
            "master_port": int(port),
            "rank_offset": 1,
            "world_size": 2,
            "group_name": group_name,
            "backend": "gloo",
        }
        joined = pool.submit(server.post, "/init_weights_update_group", body)
        group = init_side_group(url, 0, 2, "gloo", group_name, store=store)
        assert joined.result()["success"]
        server.post("/begin_weight_update")
        body = {
            "names": list(tensors),
            "dtypes": ["float32"] * len(tensors),
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": group_name,
            "load_format": load_format,
            "weight_version": "3",
        }
        received = pool.submit(server.post, "/update_weights_from_distributed", body)
        if load_format is None:
            for tensor in tensors.values():
                dist.broadcast(tensor.contiguous(), group=group, group_src=0)
        else:
            flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()])
            dist.broadcast(flat, group=group, group_src=0)
        assert received.result()["success"]
        server.post("/end_weight_update")
        assert server.post("/destroy_weights_update_group", {"group_name": group_name})["success"]
        destroy_side_group(group)
    assert_serves(server, policies[1], "3")


def test_rules_of_a_session(server: EngineServer, policies: list[Policy]):
    tensors = {"model.norm.weight": policies[1].tensors["model.norm.weight"]}
    with pytest.raises(
        HttpError, match=r"must run between begin_weight_update.. and end_weight_update"
    ) as error:
        send(server, tensors)
    assert error.value.status == 400
    with pytest.raises(HttpError, match="without begin_weight_update"):
        server.post("/end_weight_update")
    server.post("/begin_weight_update")
    with pytest.raises(HttpError, match="a weight-update session is already open"):
        server.post("/begin_weight_update")
    server.post("/end_weight_update")
    assert_serves(server, policies[0], "0")


def test_wrong_payloads_are_refused_and_change_nothing(
    server: EngineServer, policies: list[Policy], tmp_path: Path
):
    norm = policies[1].tensors["model.norm.weight"]
    server.post("/begin_weight_update")
    with pytest.raises(HttpError, match=r"no parameter 'model.nrom.weight'"):
        send(server, {"model.nrom.weight": norm})
    with pytest.raises(HttpError, match=r"shape .32. was sent, the model has .64."):
        send(server, {"model.norm.weight": norm[:32]})
    with pytest.raises(HttpError, match="takes no pickled tensors"):
        server.post("/update_weights_from_tensor", {"serialized_named_tensors": ["gASVBA=="]})
    with pytest.raises(HttpError, match="cannot open the shared buffer"):
        server.post(
            "/update_weights_from_tensor",
            {
                "load_format": "slime_shm",
                "handle": {"kind": "shm", "name": "/etc/passwd", "size": 3},
                "metadata": [],
            },
        )
    server.post("/end_weight_update")
    with pytest.raises(HttpError, match=r"no model.safetensors"):
        server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    other = make_tiny_checkpoint(tmp_path / "m", num_hidden_layers=3)
    with pytest.raises(HttpError, match="not a checkpoint of this model"):
        server.post("/update_weights_from_disk", {"model_path": str(other)})
    with pytest.raises(HttpError, match="no weight update group 'ghosts'"):
        server.post("/destroy_weights_update_group", {"group_name": "ghosts"})
    assert_serves(server, policies[0], "0")


def test_an_update_forgets_prefixes_computed_with_old_weights(
    server: EngineServer, policies: list[Policy], tmp_path
):
    prompt = [*range(40), *PROMPT]
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    post_json(f"{server.url}/generate", body)
    server.post(
        "/update_weights_from_disk", {"model_path": str(policies[1].path), "flush_cache": False}
    )
    reply = post_json(f"{server.url}/generate", body)
    assert reply["meta_info"]["cached_tokens"] == 0
    model = AutoModelForCausalLM.from_pretrained(policies[1].path)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert reply["output_ids"] == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_request_across_an_update_reports_both_versions(
    server: EngineServer, policies: list[Policy], mode: str
):
    with server.under_way(ENDLESS) as [running]:
        server.post("/pause_generation", {"mode": mode})
        steps = server.state["num_steps"]
        update = {"model_path": str(policies[1].path), "weight_version": "9"}
        assert server.post("/update_weights_from_disk", update)["success"]
        server.post("/continue_generation")
        wait_for(lambda: server.state["num_steps"] > steps + 5)
        server.post("/abort_request", {"abort_all": True})
        reply = running.result()
    first, second = reply["meta_info"]["weight_versions"]
    assert (first["version"], second["version"]) == ("0", "9")
    assert 0 == first["start"] < first["end"] == second["start"] < second["end"]
    assert second["end"] == len(reply["output_ids"])


def test_an_update_without_pause_waits_for_requests_in_flight(
    server: EngineServer, policies: list[Policy]
):
    with ThreadPoolExecutor() as pool, server.under_way(ENDLESS) as [before]:
        update = {"model_path": str(policies[1].path), "weight_version": "1"}
        updated = pool.submit(server.post, "/update_weights_from_disk", update)
        time.sleep(0.3)  # if it did not wait it would be done by now, and show in what follows
        assert not updated.done()
        server.post("/abort_request", {"abort_all": True})
        assert [s["version"] for s in before.result()["meta_info"]["weight_versions"]] == ["0"]
        assert updated.result()["success"]
    assert_serves(server, policies[1], "1")


def test_requests_that_come_while_an_update_waits_are_held_back(policies: list[Policy]):
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    before, after = (
        Request(rid=rid, token_ids=[*PROMPT], prompt_len=len(PROMPT), params=params, seed=0)
        for rid in ("before", "after")
    )
    with local_engine(policies[0].path, max_total_tokens=1024) as local:
        engine = local.engine

        def update() -> int:
            engine.weight_version = "1"
            return engine.in_flight

        all_are_there = threading.Event()
        engine.call(all_are_there.wait)
        engine.submit([before])
        updated = engine.call(update, exclusive=True)
        engine.submit([after])
        all_are_there.set()
        assert updated.result() == 1  # the one that is held back
        local.wait([before, after])
    assert [span.version for span in before.version_spans] == ["default"]
    assert [span.version for span in after.version_spans] == ["1"]


def test_an_update_whose_sender_hung_up_is_left_out(server: EngineServer, policies: list[Policy]):
    with server.under_way(ENDLESS):
        update = {"model_path": str(policies[1].path), "weight_version": "1"}
        with pytest.raises(HttpError, match="no answer within"):
            url = f"{server.url}/update_weights_from_disk"
            post_json(url, update, token=TOKEN, timeout=0.5)
        for _ in range(5):  # the server hears of the end of that connection before these
            assert server.state["weight_version"] == "0"
    assert_serves(server, policies[0], "0")


def test_a_damaged_tensor_shows_in_its_checksum_alone(
    server: EngineServer, policies: list[Policy], tmp_path: Path
):
    from safetensors.torch import load_file, save_file

    copy = Path(shutil.copytree(policies[0].path, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    server.post("/update_weights_from_disk", {"model_path": str(copy)})
    expected, found = policies[0].checksums(), checksums(server)
    assert {n for n in expected if expected[n] != found[n]} == {name}
