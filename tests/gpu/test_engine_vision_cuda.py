"""Images on one GPU against Hugging Face; the forward alone also in Triton's interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from slime.data.images import load_image_processor  # noqa: E402
from slime.engine.kernels.cuda_kernels import CudaKernels  # noqa: E402
from slime.engine.kernels.interface import Tokens  # noqa: E402
from slime.engine.kv_cache import KVCache  # noqa: E402
from slime.engine.models.cuda_runner import _tiles  # noqa: E402
from slime.engine.models.fast_model import FastModel  # noqa: E402
from slime.engine.models.vision_tower import VisionTower  # noqa: E402
from slime.engine.scheduler.prompt_images import place_images  # noqa: E402
from tests.engines import local_engine  # noqa: E402
from tests.tiny_vision import make_vision_checkpoint  # noqa: E402
from tests.vision_reference import check, hf_inputs, make_prompts  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SIZES = {"max_total_tokens": 20000, "dtype": "float32"}
gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_vision_checkpoint(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES[:2])
@torch.inference_mode()
def test_prefill_in_two_chunks_and_a_decoded_token(models: dict[str, Path], family: str):
    """The first chunk ends inside an image; the decoded token is shifted by the delta alone."""
    path = models[family]
    (ids,), (images,) = make_prompts(path, 2)
    placed = place_images(ids, images, load_image_processor(str(path)))
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    tower = VisionTower(model.to(DEVICE).eval(), load_image_processor(str(path)))
    text, cut = [*ids, 7], placed.placed[0].start + 3
    expected = model(**{k: v.to(DEVICE) for k, v in hf_inputs(path, text, images).items()}).logits[
        0
    ]
    fast = FastModel(model, CudaKernels(), 400)
    cache = KVCache(fast.layers, 30, 16, torch.float32, DEVICE)
    table = torch.arange(1, 26, dtype=torch.int32, device=DEVICE)[None]
    logits = []
    for start, end in ((0, cut), (cut, len(ids)), (len(ids), len(text))):
        positions = torch.arange(start, end, dtype=torch.int32, device=DEVICE)
        tokens = Tokens(
            ids=torch.tensor(text[start:end], dtype=torch.int32, device=DEVICE),
            positions=positions,
            rows=torch.zeros_like(positions),
        )
        if end <= len(ids):
            tokens.tiles = torch.from_numpy(_tiles([end - start])).to(DEVICE)
            tokens.rope = torch.from_numpy(placed.rope_positions(start, end)).to(DEVICE).long()
            tokens.images = tower.inputs(placed.rows(start, end, 0))
        else:
            tokens.angles = positions + placed.delta
        logits.append(fast(tokens, cache, table))
    np.testing.assert_allclose(torch.cat(logits).cpu(), expected.cpu(), rtol=0, atol=2e-3)


@gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 11, "page_size": 4},
        {"max_total_tokens": 256, "page_size": 8, "chunked_prefill_size": 24},
        {"enable_deterministic_inference": True, "chunked_prefill_size": 40},
    ],
    ids=["whole", "chunks", "full", "deterministic"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_images_beside_text(models: dict[str, Path], family: str, options: dict[str, Any]):
    path = models[family]
    prompts, images = make_prompts(path, 1, 0, 3, 2, 0)
    params: dict[str, Any] = {"start_len": 0, "max_new_tokens": 12, **GREEDY}
    with local_engine(path, **{**SIZES, **options}) as engine:
        requests = engine.generate(prompts, images=images, **params)
        requests += engine.generate(prompts, images=images, max_new_tokens=12, **GREEDY)
    check(path, requests, images * 2, tolerance=2e-3)


@gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_mode_on_the_gpu(models: dict[str, Path], family: str):
    """With and without a CUDA graph, alone and among others, a request gives the same bits."""
    path = models[family]
    prompts, images = make_prompts(path, 2, 0, 1, 1)
    params: dict[str, Any] = {"start_len": 0, "max_new_tokens": 8, **GREEDY}
    options = {"enable_deterministic_inference": True, "disable_radix_cache": True}
    with local_engine(path, max_total_tokens=20000, **options) as engine:
        crowd = engine.generate(prompts, images=images, **params)
        alone = [
            engine.generate([ids], images=[found], **params)[0]
            for ids, found in zip(prompts, images, strict=True)
        ]
    for one, other in zip(alone, crowd, strict=True):
        assert one.output_ids == other.output_ids
        assert one.input_log_probs == other.input_log_probs
        assert one.output_log_probs == other.output_log_probs


@gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_behind_an_image_has_its_own_positions(models: dict[str, Path], family: str):
    """In one row, deterministic mode: chunks of a prompt that sample nothing read the row's delta too."""
    path = models[family]
    prompts, images = make_prompts(path, 2)
    prompts, images = [*prompts, list(range(3, 90))], [*images, []]
    options = {"enable_deterministic_inference": True, "max_running_requests": 1, "page_size": 8}
    params: dict[str, Any] = {"start_len": 0, "max_new_tokens": 8, **GREEDY}
    with local_engine(path, chunked_prefill_size=24, **SIZES, **options) as engine:
        requests = [
            engine.generate([ids], images=[found], **params)[0]
            for ids, found in zip(prompts, images, strict=True)
        ]
    check(path, requests, images, tolerance=2e-3)


@gpu
def test_drafts_change_no_token(models: dict[str, Path]):
    path = models["qwen3_vl"]
    prompts, images = make_prompts(path, 2, 0, 1)
    found = []
    for algorithm in (None, "NGRAM"):
        with local_engine(path, speculative_algorithm=algorithm, **SIZES) as engine:
            requests = engine.generate(prompts, images=images, max_new_tokens=40, **GREEDY)
            found.append([request.output_ids for request in requests])
    assert found[0] == found[1]


@gpu
def test_memory_goes_back_and_returns(models: dict[str, Path]):
    path = models["qwen3_vl"]
    prompts, images = make_prompts(path, 2, 1)
    with local_engine(path, **SIZES) as local:
        engine = local.engine
        before = local.generate(prompts, images=images, max_new_tokens=8, **GREEDY)
        engine.call(lambda: engine.release_memory(["weights", "kv_cache"])).result()
        assert engine.runner.tower is not None and engine.runner.tower.held_bytes == 0
        engine.call(lambda: engine.resume_memory(["weights", "kv_cache"])).result()
        after = local.generate(prompts, images=images, max_new_tokens=8, **GREEDY)
    assert [r.output_ids for r in after] == [r.output_ids for r in before]
    check(path, after, images, tolerance=2e-3)
