"""The engine on one GPU: tokens and log-probs of Hugging Face, memory given back, weights by CUDA IPC."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.engine.weights import TensorMeta
from slime.weights.fp8 import Fp8Format, convert_to_fp8
from tests.engines import LocalEngine, engine_server, local_engine
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = {"max_total_tokens": 20000}


HYBRID = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]  # a state per request beside the KV cache


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3_moe", *HYBRID])
def checkpoint(request, tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"))


def make_prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 100))] for _ in range(count)]


@torch.no_grad()
def log_probs(path: Path, request, dtype: torch.dtype, seed: int | None = None) -> torch.Tensor:
    """Return Hugging Face's; with a seed, those of weights that differ by the rounding of fp32."""
    # torch's grouped matmul takes no fp64
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options).cuda().eval()
    if seed is not None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, device="cuda", dtype=dtype)
            param.mul_(1 + 2**-24 * noise)
    logits = model(torch.tensor([request.token_ids], device="cuda")).logits[0, :-1]
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    targets = request.token_ids[1:]
    return logits.log_softmax(-1)[range(len(targets)), targets][request.prompt_len - 1 :].cpu()


def effect_of_rounding(path: Path, request) -> torch.Tensor:
    """How far rounding moves each log-prob: it may send a token to another expert."""
    exact = log_probs(path, request, torch.float64)
    moved = [log_probs(path, request, torch.float64, seed) for seed in range(3)]
    return torch.stack([(one - exact).abs() for one in moved]).amax(0)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_total_tokens": 256, "page_size": 8, "chunked_prefill_size": 24}],
    ids=["plain", "full"],
)
def test_greedy_output_in_fp32_is_hugging_faces(checkpoint: Path, options: dict):
    prompts = make_prompts(8)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    with local_engine(checkpoint, dtype="float32", **{**SIZES, **options}) as engine:
        requests = engine.generate(prompts, temperature=0, max_new_tokens=40)
        requests += engine.generate(prompts, temperature=0, max_new_tokens=40)
    for request in requests:
        prompt = torch.tensor([request.token_ids[: request.prompt_len]], device="cuda")
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
        )
        assert request.token_ids == expected[0].tolist()
        found = torch.tensor(request.output_log_probs)
        wanted = log_probs(checkpoint, request, torch.float32)
        allowed = 1e-4 + effect_of_rounding(checkpoint, request)
        assert ((found - wanted).abs() < allowed).all()


def test_bf16_is_the_default_and_close_to_hugging_faces(qwen3: Path):
    with local_engine(qwen3, **SIZES) as engine:
        assert engine.engine.runner.dtype == torch.bfloat16
        requests = engine.generate(make_prompts(8), max_new_tokens=30)
    for request in requests:
        found = torch.tensor(request.output_log_probs)
        assert (found - log_probs(qwen3, request, torch.bfloat16)).abs().mean() < 0.05


def test_deterministic_mode_on_the_gpu(qwen3: Path):
    prompts = make_prompts(10)
    params = {"temperature": 0.8, "max_new_tokens": 30, "ignore_eos": True}
    with local_engine(qwen3, enable_deterministic_inference=True, **SIZES) as engine:
        alone = [engine.generate([p], seeds=[i], **params)[0] for i, p in enumerate(prompts)]
        crowd = engine.generate(prompts, seeds=list(range(10)), **params)
    assert [r.output_ids for r in alone] == [r.output_ids for r in crowd]
    assert [r.output_log_probs for r in alone] == [r.output_log_probs for r in crowd]


@pytest.mark.parametrize("deterministic", [False, True])
def test_draft_tokens_change_no_output_token(checkpoint: Path, deterministic: bool):
    """More rows of one request in one forward; without deterministic mode fp32 keeps rounding small."""
    if json.loads((checkpoint / "config.json").read_text())["model_type"].startswith(tuple(HYBRID)):
        pytest.skip("a state cannot be taken back when a draft token is rejected")
    prompts = [*make_prompts(6), [5, 6, 7] * 9]
    options = {**SIZES, "dtype": "float32", "enable_deterministic_inference": deterministic}
    found = []
    for algorithm in (None, "NGRAM"):
        with local_engine(checkpoint, speculative_algorithm=algorithm, **options) as engine:
            requests = engine.generate(prompts, temperature=0, max_new_tokens=40, ignore_eos=True)
            requests += engine.generate(prompts, temperature=0.5, top_p=0.9, max_new_tokens=20)
            found.append([(r.output_ids, r.output_log_probs) for r in requests])
    guesses = [r.draft_history for r in requests if r.draft_history is not None]
    assert sum(g.num_correct for g in guesses) > 0
    if deterministic:
        assert found[0] == found[1]
    for (ids, values), (ids2, values2) in zip(*found, strict=True):
        assert ids == ids2
        assert values2 == pytest.approx(values, abs=1e-3)


def test_fp8_blocks_serve_as_the_weights_they_stand_for(tmp_path: Path):
    """Scales of blocks of 128 x 128, unpacked by a loop here; both served in bf16: same bits."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    plain = make_tiny_checkpoint(tmp_path / "plain", dtype=torch.bfloat16, **sizes)
    convert_to_fp8(plain, tmp_path / "fp8", Fp8Format(strategy="block", block=(128, 128)))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    held = load_file(tmp_path / "fp8" / "model.safetensors")
    packed = [name for name, tensor in held.items() if tensor.dtype == torch.float8_e4m3fn]
    for name in packed:
        whole, scales = held[name].float(), held[f"{name}_scale_inv"].float()
        for i in range(0, whole.shape[0], 128):
            for j in range(0, whole.shape[1], 128):
                whole[i : i + 128, j : j + 128] *= scales[i // 128, j // 128]
        model.state_dict()[name].copy_(whole.bfloat16())
    model.save_pretrained(tmp_path / "unpacked")
    outcomes = []
    for folder in ("fp8", "unpacked", "plain"):
        options = {"skip_tokenizer_init": True, "dtype": "bfloat16", **SIZES}
        with local_engine(tmp_path / folder, **options) as engine:
            requests = engine.generate(make_prompts(6), max_new_tokens=30, ignore_eos=True)
        outcomes.append([(r.output_ids, r.output_log_probs) for r in requests])
    assert len(packed) == 14  # seven matrices in each of two layers
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != outcomes[2]


def test_memory_goes_back_and_returns(qwen3: Path):
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved()  # of engines that earlier tests left in this process
    with local_engine(qwen3, mem_fraction_static=0.3) as local:
        engine = local.engine
        before = _greedy(local)
        used = torch.cuda.memory_reserved() - others
        engine.call(lambda: engine.release_memory(["kv_cache", "weights"])).result()
        assert torch.cuda.memory_reserved() - others < used / 10
        engine.call(lambda: engine.resume_memory(["weights", "kv_cache"])).result()
        assert _greedy(local) == before


def _greedy(engine: LocalEngine) -> list[list[int]]:
    """Of batches of several sizes, each with a graph of its own."""
    found = [engine.generate([[1, 2, 3]] * n, temperature=0, max_new_tokens=8) for n in (1, 3, 7)]
    return [request.output_ids for requests in found for request in requests]


_EXPORT = """
import json, sys, torch
from slime.weights.ipc import SharedBuffer
buffer = SharedBuffer(256, "cuda")
buffer.tensor.copy_(torch.full((64,), 2.5, device="cuda").view(torch.uint8))
print(json.dumps(buffer.export()), flush=True)
sys.stdin.readline()
"""


def test_weights_come_by_cuda_ipc(qwen3: Path):
    meta = TensorMeta(name="model.norm.weight", dtype=torch.float32, shape=(64,), offset=0)
    child = subprocess.Popen(
        [sys.executable, "-c", _EXPORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        assert child.stdout is not None
        handle = json.loads(child.stdout.readline())
        local = stack.enter_context(local_engine(qwen3, **SIZES))
        engine = local.engine
        engine.call(lambda: engine.weights.update_from_buffer(handle, [meta])).result()
        assert (engine.runner.model.model.norm.weight == 2.5).all()
    child.wait()


def test_constraints_and_top_log_probs_beside_plain_requests(qwen3: Path):
    pytest.importorskip("llguidance")
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32).cuda().eval()
    body = {"input_ids": [[5, 6, 7]] * 4, "return_logprob": True, "top_logprobs_num": [0, 3, 0, 3]}
    plain = {"max_new_tokens": 20, "temperature": 1, "sampling_seed": 3}
    held = {**plain, "regex": "[0-9]{4}-[a-f]{3}"}
    with engine_server(qwen3, "--dtype", "float32", "--max-total-tokens", "20000") as server:
        alone = server.post("/generate", {**body, "input_ids": [5, 6, 7], "top_logprobs_num": 0,
                                          "sampling_params": plain})  # fmt: skip
        replies = server.post("/generate", {**body, "sampling_params": [plain, plain, held, held]})
    assert replies[0]["output_ids"] == replies[1]["output_ids"] == alone["output_ids"]
    for reply in replies:
        ids = torch.tensor([[5, 6, 7, *reply["output_ids"]]], device="cuda")
        expected = model(ids).logits[0, 2:-1].float().log_softmax(-1)
        found = [row[0] for row in reply["meta_info"]["output_token_logprobs"]]
        wanted = expected.gather(1, ids[:, 3:].T).squeeze(1).tolist()
        assert found == pytest.approx(wanted, abs=1e-3)
    for reply in replies[2:]:
        assert re.fullmatch(held["regex"], reply["text"])
    for i, row in enumerate(replies[1]["meta_info"]["output_top_logprobs"]):
        top = model(torch.tensor([[5, 6, 7, *alone["output_ids"][:i]]], device="cuda")).logits[
            0, -1
        ]
        assert [token for _, token, _ in row] == top.topk(3).indices.tolist()
