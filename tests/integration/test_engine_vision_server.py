"""Images over HTTP: SGLang's `image_data`, parts of chat messages, hostile requests, weight updates."""

from __future__ import annotations

import base64
import shutil
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from slime.engine.engine import Engine
from slime.engine.weights import parse_metadata
from slime.utils.sync_http import HttpError
from slime.weights.buckets import Bucket, pack
from slime.weights.checksum import tensor_checksum
from slime.weights.ipc import SharedBuffer
from tests.adapters import make_adapter
from tests.engines import EngineServer, engine_server, local_engine
from tests.tiny import make_tiny_checkpoint
from tests.tiny_vision import IMAGE, PLACE, make_image, make_vision_checkpoint
from tests.vision_reference import TOLERANCE, check, encode, hf_inputs, log_probs_of, make_prompts

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
A, B = make_image(32, 16, seed=1), make_image(16, 40, seed=2)


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path):
    with engine_server(model, "--context-length", "300") as server:
        yield server


def generate(server: EngineServer, **body: Any) -> Any:
    options = {"sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0}
    return server.post("/generate", {**options, **body})


def refused(server: EngineServer, route: str = "/generate", **body: Any) -> str:
    with pytest.raises(HttpError) as error:
        server.post(route, body)
    assert error.value.status == 400, error.value
    assert "Traceback" not in str(error.value)
    return str(error.value)


def check_reply(model: Path, reply: Any, ids: list[int], images: list[bytes]) -> None:
    meta = reply["meta_info"]
    triples = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [triple[1] for triple in triples] == ids + reply["output_ids"]
    expected = log_probs_of(model, ids + reply["output_ids"], images, len(ids))
    found = torch.tensor([triple[0] for triple in triples[1:]])
    assert (found[: len(expected)] - expected).abs().max() < TOLERANCE


def test_tokens_and_text_with_images(model: Path, server: EngineServer):
    text = f"one {PLACE} two {PLACE}?"
    ids = encode(model, text, [A, B])
    given = generate(server, input_ids=ids, image_data=[uri(A), uri(B)])
    check_reply(model, given, ids, [A, B])
    from_text = generate(server, text=text, image_data=[uri(A), uri(B)])
    check_reply(model, from_text, ids, [A, B])
    one = encode(model, f"{PLACE}?", [A])
    check_reply(model, generate(server, text=f"{PLACE}?", image_data=uri(A)), one, [A])
    assert server.get("/model_info")["has_image_understanding"]


def test_batches_and_samples(model: Path, server: EngineServer):
    texts = [f"first {PLACE}", "text alone", f"{PLACE} and {PLACE}"]
    images = [[A], [], [B, A]]
    prompts = [encode(model, text, found) for text, found in zip(texts, images, strict=True)]
    data = [uri(A), None, [uri(B), uri(A)]]
    for body in ({"text": texts}, {"input_ids": prompts}):
        replies = generate(server, **body, image_data=data)
        for reply, ids, found in zip(replies, prompts, images, strict=True):
            check_reply(model, reply, ids, found)
    shared = generate(server, text=[f"a{PLACE}", f"b{PLACE}"], image_data=uri(B))
    for reply, start in zip(shared, "ab", strict=True):
        check_reply(model, reply, encode(model, f"{start}{PLACE}", [B]), [B])
    params = {"n": 3, "max_new_tokens": 8, "ignore_eos": True}
    samples = generate(server, input_ids=prompts[0], image_data=uri(A), sampling_params=params)
    for reply in samples:
        check_reply(model, reply, prompts[0], [A])


@pytest.mark.parametrize("stream", [False, True])
def test_chat_with_images(model: Path, server: EngineServer, stream: bool):
    parts = [
        {"type": "text", "text": "what is "},
        {"type": "image_url", "image_url": {"url": uri(A), "detail": "low"}},
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "!"}]
    messages.append({"role": "tool", "content": [{"type": "image_url", "image_url": uri(B)}]})
    ids = encode(model, f"what is {PLACE}?!{PLACE}", [A, B])
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    expected = generate(server, input_ids=ids, image_data=[uri(A), uri(B)])
    if not stream:
        reply = server.post("/v1/chat/completions", {**body, "logprobs": True})
        assert reply["usage"]["prompt_tokens"] == len(ids)
        found = [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]
        triples = expected["meta_info"]["output_token_logprobs"]
        assert found == pytest.approx([triple[0] for triple in triples], abs=TOLERANCE)
    else:
        events = server.post("/v1/chat/completions", {**body, "stream": True})
        assert "chat.completion.chunk" in events and events.rstrip().endswith("[DONE]")


# ---- hostile requests


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        size, sum_ = struct.pack(">I", len(data)), struct.pack(">I", zlib.crc32(kind + data))
        return size + kind + data + sum_

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("https://example.org/a.png", "must be data URIs"),
        ("file:///etc/passwd", "must be data URIs"),
        ("/etc/passwd", "must be data URIs"),
        (base64.b64encode(A).decode(), "must be data URIs"),
        ("data:text/plain;base64,aGk=", "begins data:image/png;base64"),
        ("data:image/png,abc", "begins data:image/png;base64"),
        ("data:image/png;base64,####", "base64 is broken"),
        (uri(A[:60]), "cannot be decoded"),
        (uri(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "cannot be decoded"),
        (uri(bomb(9000, 9000)), "9000 x 9000 pixels"),
        (uri(bomb(1 << 20, 1 << 20)), "pixels"),
        (uri(make_image(2000, 4)), "aspect ratio"),
        (7, "has int"),
        ({"url": "x"}, "has dict"),
        ([["data:"]], "has list"),
        ([None], "has NoneType"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_image_is_refused(model: Path, server: EngineServer, data: Any, message: str):
    ids = encode(model, f"a{PLACE}", [A])
    assert message in refused(server, input_ids=ids, image_data=data)
    assert message in refused(server, text=f"a{PLACE}", image_data=data)
    assert generate(server, input_ids=ids, image_data=uri(A))["output_ids"]


def test_no_file_of_the_server_is_read(model: Path, server: EngineServer, tmp_path: Path):
    path = tmp_path / "a.png"
    path.write_bytes(A)
    for source in (str(path), f"file://{path}"):
        assert "must be data URIs" in refused(server, text=PLACE, image_data=source)
        part = {"type": "image_url", "image_url": {"url": source}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        assert "must be data URIs" in refused(server, "/v1/chat/completions", **body)


def test_more_images_than_the_context_are_not_all_decoded(server: EngineServer):
    """Ten thousand images of 16 x 16 tokens: after two of them the prompt cannot fit any more."""
    image = uri(make_image(256, 256))
    started = time.monotonic()
    content = [{"type": "image_url", "image_url": {"url": image}}] * 250
    chat = {"model": "", "messages": [{"role": "user", "content": content}]}
    assert "context length (300 tokens)" in refused(server, "/v1/chat/completions", **chat)
    message = refused(server, text=PLACE * 10_000, image_data=[uri(A)] * 10_000)
    assert "context length" in message and time.monotonic() - started < 20


def test_images_and_tokens_that_do_not_match(model: Path, server: EngineServer):
    ids = encode(model, f"a{PLACE}b", [A])
    data = uri(A)
    for wrong in (ids[:4] + ids[5:], [*ids, IMAGE], [1, 2, 3], [IMAGE]):
        assert "image tokens" in refused(server, input_ids=wrong, image_data=data)
    at = ids.index(IMAGE)
    apart = [*ids[: at + 2], 7, *ids[at + 2 :]]
    assert "not contiguous" in refused(server, input_ids=apart, image_data=data)
    assert "its 2 images need 16" in refused(server, input_ids=ids, image_data=[data, data])
    assert "its 0 images" in refused(server, input_ids=ids)
    assert "0 image placeholders and 1" in refused(server, text="a", image_data=data)
    assert "2 image placeholders and 1" in refused(server, text=f"{PLACE}{PLACE}", image_data=data)
    assert "3 entries for 2 prompts" in refused(server, text=["a", "b"], image_data=[data] * 3)
    large = [uri(make_image(64, 64, seed=n)) for n in range(5)]  # 64 tokens each, of 300
    assert "longer than the model's context" in refused(server, text=PLACE * 5, image_data=large)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url"}], "an image must be"),
        ([{"type": "image_url", "image_url": {"url": 7}}], "an image must be"),
        ([{"type": "image_url", "image_url": uri(A)}, {"type": "video_url"}], "texts and images"),
        ([{"type": "input_audio", "text": None}], "only text content"),
        (
            [{"type": "image_url", "image_url": uri(A)}, {"type": "text", "text": PLACE}],
            "2 image placeholders",
        ),
        (PLACE, "image tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_chats(server: EngineServer, content: Any, message: str):
    """Texts that spell the placeholder of an image are refused: only the template may write it."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    assert message in refused(server, "/v1/chat/completions", **body)


def test_a_text_model_takes_no_images(tmp_path: Path):
    with engine_server(make_tiny_checkpoint(tmp_path)) as server:
        assert "a qwen3 model takes no images" in refused(server, text="a", image_data=uri(A))
        part = {"type": "image_url", "image_url": {"url": uri(A)}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        refused(server, "/v1/chat/completions", **body)
        assert not server.get("/model_info")["has_image_understanding"]


# ---- weights


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_updates_of_the_language_half_and_of_the_tower(family: str, tmp_path: Path):
    old, new = (make_vision_checkpoint(tmp_path / str(n), family, seed=n) for n in range(2))
    tensors = load_file(new / "model.safetensors")
    halves = {
        part: {
            n: t for n, t in tensors.items() if n.startswith("model.visual.") == (part == "tower")
        }
        for part in ("language", "tower")
    }
    folder = tmp_path / "language"
    folder.mkdir()
    mixed = make_vision_checkpoint(tmp_path / "mixed", family, seed=0)
    save_file(
        {**load_file(mixed / "model.safetensors"), **halves["language"]},
        mixed / "model.safetensors",
        metadata={"format": "pt"},
    )
    save_file(halves["language"], folder / "model.safetensors")
    prompts, images = make_prompts(old, 2, 0, 1)
    params: dict[str, Any] = {
        "images": images,
        "start_len": 0,
        "max_new_tokens": 4,
        "temperature": 0,
    }
    with local_engine(old) as local:
        engine, tower = local.engine, local.engine.runner.tower
        assert tower is not None
        check(old, local.generate(prompts, **params), images)
        assert tower.num_runs == 3
        engine.call(lambda: read(engine, folder)).result()
        check(mixed, local.generate(prompts, **params), images)
        assert tower.num_runs == 3  # it did not change
        engine.call(lambda: send(engine, halves["tower"])).result()
        check(new, local.generate(prompts, **params), images)
        assert tower.num_runs == 6
        sums = engine.call(engine.weights.checksums).result()
    assert sums == {name: tensor_checksum(name, t) for name, t in tensors.items()}


def send(engine: Engine, tensors: dict[str, torch.Tensor]) -> None:
    """Write a bucket from shared memory, as a trainer on the same machine sends it."""
    bucket = Bucket(index=0, tensors=list(tensors.items()))
    buffer = SharedBuffer(bucket.packed_nbytes)
    try:
        metas = parse_metadata(pack(bucket, buffer.tensor))
        engine.weights.begin_session()
        engine.weights.update_from_buffer(buffer.export(), metas)
        engine.weights_changed()
        engine.weights.end_session()
    finally:
        buffer.close()


def read(engine: Engine, folder: Path) -> None:
    engine.weights.update_from_disk(str(folder))
    engine.weights_changed()


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("nested", [False, True], ids=["text", "nested"])
def test_adapters_of_the_language_half(tmp_path: Path, nested: bool, plain: bool):
    """Trained beside the tower or without it, an adapter has other names and the same effect."""
    path = make_vision_checkpoint(tmp_path / "model", "qwen3_5_moe")
    targets = r".*(language_model|model)\.layers.*(q_proj|o_proj|in_proj_qkv)"
    folder = make_adapter(path, tmp_path / "adapter", targets=targets)
    renamed = {
        name.replace("model.model.layers", "model.model.language_model.layers"): tensor
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    if nested:
        save_file(renamed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    prompts, images = make_prompts(path, 1, 2)
    adapted = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(path), with_names(folder, renamed)
    ).eval()
    with local_engine(
        path, lora_paths=(("a", str(folder)),), enable_return_routed_experts=plain
    ) as local:
        requests = local.generate(
            *(prompts * 2,),
            images=images * 2,
            adapters=["a", "a", None, None],
            start_len=0,
            max_new_tokens=4,
            temperature=0,
        )
    check(path, requests[2:], images)
    for request, found in zip(requests[:2], images, strict=True):
        inputs = hf_inputs(path, request.token_ids[:-1], found)
        with torch.no_grad():
            log_probs = adapted(**inputs).logits[0].log_softmax(-1)
        expected = log_probs.gather(1, torch.tensor(request.token_ids)[1:, None])[:, 0]
        found_log_probs = torch.tensor(request.input_log_probs + request.output_log_probs)
        assert (found_log_probs - expected).abs().max() < 2e-4
        assert (
            expected - log_probs_of(path, request.token_ids, found, request.prompt_len)
        ).abs().max() > 0.01


def with_names(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Return a copy of an adapter with these tensors."""
    other = folder.with_name("nested")
    shutil.copytree(folder, other)
    save_file(tensors, other / "adapter_model.safetensors", metadata={"format": "pt"})
    return other
