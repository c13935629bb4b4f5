"""Adapters on the real SGLang: what it serves is what PEFT computes, however the adapter was sent."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime.config.lora import LoraConfig
from slime.core.errors import WeightMismatchError
from slime.core.types import EngineInfo
from slime.weights.adapter_update import AdapterUpdate
from slime.weights.distributed_transport import DistributedTransport
from slime.weights.lora_sync import AdapterSync
from slime.weights.peft_folder import read_peft_weights
from tests.adapters import make_adapter, peft_log_probs
from tests.e2e import runs
from tests.engines import EngineServer
from tests.parity.tiny_families import make_family
from tests.sglang_server import sglang_server
from tests.tiny import make_byte_tokenizer, make_tiny_checkpoint

pytestmark = pytest.mark.timeout(1800)  # a start of a server takes minutes on busy cores

# Each name: rank, targets, options. SGLang fuses q, k, v and gate, up, and ignores rsLoRA.
ADAPTERS = {
    "r2": (2, ["q_proj"], {}),
    "r8": (8, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"], {"use_rslora": True}),
    "r3": (3, ["k_proj", "o_proj", "up_proj", "down_proj"], {}),
}
SLOTS = {"sglang_enable_lora": True, "sglang_max_lora_rank": 8, "lora_rank": 8}
PROMPTS = [[(7 * i + 13 * k) % 250 for i in range(20 + k)] for k in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """As for the other tests, but with a context that a long request does not exceed."""
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    return make_tiny_checkpoint(folder, weight_scale=2.0, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory) -> dict[str | None, Path | None]:
    root = tmp_path_factory.mktemp("adapters")
    made: dict[str | None, Path | None] = {None: None}
    for seed, (name, (rank, targets, options)) in enumerate(ADAPTERS.items()):
        made[name] = make_adapter(
            *(model, root / name), seed=seed, rank=rank, targets=targets, **options
        )
    return made


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[EngineServer]:
    with sglang_server(model, "first", **SLOTS) as server:
        yield server


def read(model: Path, folder: Path | None, name: str) -> AdapterUpdate:
    assert folder is not None
    tensors = list(read_peft_weights(folder).items())
    return AdapterUpdate(LoraConfig.read(folder), str(model), tensors, torch.float32, name)


def info(server: EngineServer) -> EngineInfo:
    return EngineInfo(url=server.url, device_ids=("cpu",), kind="sglang")


def generate(server: EngineServer, names: list[str | None], prompts: list[list[int]]) -> list[dict]:
    greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": prompts, "lora_path": names, "sampling_params": greedy}
    return server.post("/generate", {**body, "return_logprob": True, "logprob_start_len": 0})


@contextlib.contextmanager
def streaming(server: EngineServer, name: str, prompt: list[int]) -> Iterator[Iterator[bytes]]:
    """The replies to a long request; each holds all tokens so far."""
    params = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    body = {"input_ids": prompt, "lora_path": name, "sampling_params": params, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {server.token}"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        data = (line.removeprefix(b"data: ") for line in reply if line.startswith(b"data: "))
        yield (line for line in data if not line.startswith(b"[DONE]"))


def assert_served(model: Path, folder: Path | None, prompt: list[int], reply: dict) -> None:
    meta = reply["meta_info"]
    entries = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    expected = peft_log_probs(model, folder, prompt + reply["output_ids"])
    found = torch.tensor([entry[0] for entry in entries])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_a_model_whose_gate_and_up_are_one_module(tmp_path: Path):
    """GLM-4 publishes gate_up_proj, which SGLang otherwise makes of two modules."""
    model = make_family(tmp_path / "glm4", "glm4", vocab_size=320, intermediate_size=64)
    make_byte_tokenizer().save_pretrained(model)
    targets = ["q_proj", "gate_up_proj", "down_proj"]
    folder = make_adapter(model, tmp_path / "a", seed=1, rank=4, targets=targets)
    flags = {**SLOTS, "lora_rank": 4, "lora_target_modules": targets}
    prompts = [[token % 256 for token in prompt] for prompt in PROMPTS[:2]]
    with sglang_server(model, "first", **flags) as server:
        AdapterSync(token=None).update(read(model, folder, "a"), [info(server)], 1)
        replies = generate(server, ["a", None], prompts)
    for one, prompt, reply in zip((folder, None), prompts, replies, strict=True):
        assert_served(model, one, prompt, reply)


def test_adapters_sent_in_each_way_and_the_base_in_one_batch(server, model, folders, tmp_path):
    in_request = DistributedTransport(host="127.0.0.1", backend="gloo")
    ways = {
        "r2": AdapterSync(token=None),
        "r8": AdapterSync(token=None, group=in_request),
        "r3": AdapterSync(token=None, folder=str(tmp_path)),
    }
    for version, (name, sync) in enumerate(ways.items(), 1):
        report = sync.update(read(model, folders[name], name), [info(server)], version)
        assert report.version == version
        assert server.get("/model_info")["weight_version"] == str(version)
    names = list(folders)
    alone = [generate(server, [n], [p])[0] for n, p in zip(names, PROMPTS, strict=True)]
    together = generate(server, names, PROMPTS)
    assert len({tuple(reply["output_ids"]) for reply in together}) == 4
    for name, prompt, one, other in zip(names, PROMPTS, alone, together, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert_served(model, folders[name], prompt, one)
        assert_served(model, folders[name], prompt, other)


def test_an_update_ends_requests_at_the_version_that_made_their_tokens(server, model, folders):
    """A server cannot change an adapter under a request: the rollout sends it again."""
    sync = AdapterSync(token=None)
    sync.update(read(model, folders["r2"], "changing"), [info(server)], 11)
    with streaming(server, "changing", PROMPTS[0]) as lines:
        first = json.loads(next(lines))
        assert first["meta_info"]["finish_reason"] is None, first  # it runs
        sync.update(read(model, folders["r8"], "changing"), [info(server)], 12)
        cut = [json.loads(line) for line in lines][-1]
    assert cut["meta_info"]["finish_reason"]["type"] == "abort"
    assert {span["version"] for span in cut["meta_info"]["weight_versions"]} <= {"11"}
    [reply] = generate(server, ["changing"], PROMPTS[:1])
    assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["12"]
    assert_served(model, folders["r8"], PROMPTS[0], reply)  # no prefix of version 11 was used


def test_modules_without_slots_are_refused(server, model, folders):
    update = read(model, folders["r2"], "other")
    renamed = [(name.replace("q_proj", "query"), tensor) for name, tensor in update.tensors]
    wrong = AdapterUpdate(update.lora, str(model), renamed, torch.float32, "other")
    with pytest.raises(WeightMismatchError, match=r"no slots for 2 of 2 modules.*add query to"):
        AdapterSync(token=None).update(wrong, [info(server)], 21)
    server.post("/continue_generation", {})


def test_a_colocated_run_trains_an_adapter_that_sglang_serves(model, data, tmp_path):
    words = runs.command(
        model,
        data,
        tmp_path / "run",
        rollout_engine="sglang",
        num_rollout=2,
        colocate=True,
        rollout_num_gpus=None,
        lora_rank=4,
        lr=0.01,
    )
    status, output = runs.run(words, timeout=900)
    assert status == 0, output
    trained = runs.metrics(tmp_path / "run", "train")
    assert len(trained) == 2
    assert all(record["train/log_prob_gap_max"] < 1e-4 for record in trained), trained
    sent = [r["perf/update_weights_bytes"] for r in runs.metrics(tmp_path / "run", "perf")]
    whole = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert sent and max(sent) < whole / 2  # the adapter, not the model
