"""Models with vision towers in the engine, against Hugging Face's forward over each whole text and its images."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from slime.data.images import load_image_processor
from slime.engine.models.vision_tower import VisionTower
from slime.engine.scheduler.prompt_images import place_images
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams
from tests.engines import LocalEngine, local_engine
from tests.tiny_vision import IMAGE, PLACE, make_image, make_vision_checkpoint
from tests.vision_reference import (
    SIZES,
    TOLERANCE,
    check,
    encode,
    hf_inputs,
    log_probs_of,
    make_prompts,
    reference,
)

FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_vision_checkpoint(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize("plain", [False, True], ids=["fast", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_beside_text(models: dict[str, Path], family: str, plain: bool):
    path = models[family]
    if plain and "moe" not in family:
        pytest.skip("it has no experts to return, which is what takes the plain path here")
    prompts, images = make_prompts(path, 1, 0, 3, 2, 0)
    with local_engine(path, enable_return_routed_experts=plain) as engine:
        requests = engine.generate(prompts, images=images, start_len=0, max_new_tokens=8, **GREEDY)
    check(path, requests, images)


@pytest.mark.parametrize("index", range(4), ids=FAMILIES)
def test_images_cut_into_chunks_of_1_to_64(models: dict[str, Path], index: int):
    """Every size for one family or another; a chunk may begin and end anywhere in an image."""
    path = models[FAMILIES[index]]
    prompts, images = make_prompts(path, 2, 0, 1, seed=index)
    for size in range(1 + index, 65, 4):
        with local_engine(path, chunked_prefill_size=size) as engine:
            requests = engine.generate(
                prompts, images=images, start_len=0, max_new_tokens=3, **GREEDY
            )
        check(path, requests, images)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_greedy_tokens_are_those_of_generate(models: dict[str, Path], family: str):
    path = models[family]
    prompts, images = make_prompts(path, 1, 0, 3, 2, seed=5)
    with local_engine(path) as engine:
        requests = engine.generate(prompts, images=images, max_new_tokens=24, temperature=0.0)
    for ids, found, request in zip(prompts, images, requests, strict=True):
        inputs = hf_inputs(path, ids, found)
        mask = torch.ones_like(inputs["input_ids"])
        with torch.no_grad():
            theirs = reference(path).generate(
                **inputs, attention_mask=mask, max_new_tokens=24, do_sample=False
            )
        reference(path).model.rope_deltas = None  # left behind by generate
        assert request.output_ids == theirs[0, len(ids) :].tolist()


def test_the_plain_path_in_bf16(models: dict[str, Path]):
    """Hugging Face's modules in place of kernels; chunks round otherwise than one forward."""
    path = models["qwen3_vl"]
    prompts, images = make_prompts(path, 2, 0, 1)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16).eval()
    with local_engine(path, dtype="bfloat16", chunked_prefill_size=11) as engine:
        requests = engine.generate(prompts, images=images, max_new_tokens=8, **GREEDY)
    for request, found in zip(requests, images, strict=True):
        inputs = hf_inputs(path, request.token_ids, found)
        with torch.no_grad():
            log_probs = model(**inputs).logits[0, :-1].float().log_softmax(-1)
        expected = log_probs.gather(1, inputs["input_ids"][0, 1:, None])[request.prompt_len - 1 :]
        assert (torch.tensor(request.output_log_probs) - expected[:, 0]).abs().mean() < 0.05


def tower_of(local: LocalEngine) -> VisionTower:
    tower = local.engine.runner.tower
    assert tower is not None
    return tower


# ---- prefixes


def cached(path: Path, prompts, images, **options: Any) -> list[int]:
    """How many tokens of each prompt, one after the other, come from the prefix cache."""
    with local_engine(path, page_size=4, **options) as engine:
        requests = [
            engine.generate([ids], images=[found], max_new_tokens=3, **GREEDY)[0]
            for ids, found in zip(prompts, images, strict=True)
        ]
    check(path, requests, images)
    return [request.num_cached for request in requests]


def test_equal_images_hit_and_others_do_not(models: dict[str, Path]):
    path = models["qwen3_vl"]
    first, other = make_image(32, 32, seed=1), make_image(32, 32, seed=2)
    ids = encode(path, f"abcde{PLACE}xyz", [first])  # image tokens 6 .. 21
    assert ids.count(IMAGE) == 16 and ids.index(IMAGE) == 6
    images = [[first], [first], [other], [other], [first]]
    # 25 tokens, of which the last is always computed; the page of tokens 4 .. 7 is half image
    assert cached(path, [ids] * 5, images) == [0, 24, 4, 24, 24]


def test_hits_that_end_inside_an_image(models: dict[str, Path]):
    """A hit ends at a page; the log-prob of token 13 needs all from 12 on, inside the image."""
    path, image = models["qwen3_vl"], make_image(32, 32, seed=1)
    ids = encode(path, f"abcde{PLACE}xyz", [image])
    with local_engine(path, page_size=4) as engine:
        engine.generate([ids], images=[[image]], max_new_tokens=1, **GREEDY)
        [request] = engine.generate(
            [ids], images=[[image]], start_len=13, max_new_tokens=3, **GREEDY
        )
    assert request.num_cached == 12
    expected = log_probs_of(path, request.token_ids, [image], len(ids))
    scored = torch.tensor(request.input_log_probs + request.output_log_probs)
    assert (scored - expected[13:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_the_second_of_two_images_decides(models: dict[str, Path], family: str):
    path = models[family]
    a, b, c = (make_image(32, 16, seed=n) for n in range(3))
    ids = encode(path, f"ab{PLACE}cd{PLACE}ef", [a, b])
    hits = cached(path, [ids] * 3, [[a, b], [a, c], [b, a]])
    if family == "qwen3_vl":  # the other finds pages, but no state at their end
        assert ids.index(IMAGE) + 8 <= hits[1] < len(ids) - 8
    assert hits[0] == hits[2] == 0


def test_a_response_continues_after_images(models: dict[str, Path]):
    """A partial rollout: the next request has the prompt and the tokens sampled so far."""
    path = models["qwen3_vl"]
    prompts, images = make_prompts(path, 2, 1, seed=3)
    forbidden: dict[str, Any] = {"logit_bias": {str(IMAGE): -100.0}}
    with local_engine(path, page_size=4) as engine:
        turns = engine.generate(
            prompts, images=images, max_new_tokens=9, ignore_eos=True, **forbidden
        )
        texts = [turn.token_ids for turn in turns]
        after = engine.generate(texts, images=images, max_new_tokens=9, **GREEDY)
    check(path, after, images)
    for turn, request in zip(turns, after, strict=True):
        assert request.num_cached >= turn.prompt_len // 4 * 4


def test_samples_of_a_group_run_the_tower_once_per_image(models: dict[str, Path]):
    path = models["qwen3_vl"]
    prompts, images = make_prompts(path, 2, seed=4)
    with local_engine(path, chunked_prefill_size=7) as engine:
        requests = engine.generate(
            prompts * 4, images=images * 4, max_new_tokens=6, ignore_eos=True
        )
        again = engine.generate(prompts, images=images, start_len=0, max_new_tokens=6, **GREEDY)
        assert tower_of(engine).num_runs == 2
    assert len({tuple(request.output_ids) for request in requests}) == 4
    check(path, [*requests, *again], images * 5)


def test_outputs_of_the_tower_are_kept_within_a_limit(models: dict[str, Path]):
    path = models["qwen3_vl"]
    prompts, images = make_prompts(path, 3, 3, seed=6)
    with local_engine(path, chunked_prefill_size=5) as engine:
        tower = tower_of(engine)
        tower.cached_bytes = 1
        requests = engine.generate(prompts, images=images, start_len=0, max_new_tokens=3, **GREEDY)
        assert tower.num_runs > 6 and tower.held_bytes <= 1
    check(path, requests, images)


# ---- options


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_retracted_requests_continue(models: dict[str, Path], family: str):
    path = models[family]
    prompts, images = make_prompts(path, 2, 1, 0, 1, seed=7)
    size = max(map(len, prompts)) + 64
    with local_engine(path, max_total_tokens=size // 16 * 16, chunked_prefill_size=24) as engine:
        requests = engine.generate(prompts, images=images, max_new_tokens=40, **GREEDY)
    check(path, requests, images)
    assert sum(request.num_retractions for request in requests) > 0


def test_speculative_decoding(models: dict[str, Path]):
    path = models["qwen3_vl"]
    prompts, images = make_prompts(path, 2, 0, 1, seed=8)
    with local_engine(path) as engine:
        plain = engine.generate(prompts, images=images, max_new_tokens=40, **GREEDY)
    with local_engine(path, speculative_algorithm="NGRAM") as engine:
        requests = engine.generate(prompts, images=images, max_new_tokens=40, **GREEDY)
    check(path, requests, images)
    assert [r.output_ids for r in requests] == [r.output_ids for r in plain]
    assert sum(r.draft_history.num_correct for r in requests if r.draft_history) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_mode(models: dict[str, Path], family: str):
    """A request alone and among others gives the same bits."""
    path = models[family]
    prompts, images = make_prompts(path, 2, 0, 1, 1, seed=9)
    options = {"enable_deterministic_inference": True, "disable_radix_cache": True}
    params: dict[str, Any] = {"start_len": 0, "max_new_tokens": 6, **GREEDY}
    with local_engine(path, **options) as engine:
        together = engine.generate(prompts, images=images, **params)
        alone = [
            engine.generate([ids], images=[found], **params)[0]
            for ids, found in zip(prompts, images, strict=True)
        ]
    check(path, together, images)
    for one, other in zip(alone, together, strict=True):
        assert one.output_log_probs == other.output_log_probs
        assert one.input_log_probs == other.input_log_probs


# ---- random loads


class Load:
    """Requests with random texts and few images, so that prefixes are equal in tokens and differ in images."""

    def __init__(self, seed: int, path: Path, *, experts: bool, drafts: bool) -> None:
        self.rng, self._path = random.Random(seed), path
        rng, page = self.rng, self.rng.choice([1, 2, 4, 16])
        self.options: dict[str, Any] = {
            "page_size": page,
            "chunked_prefill_size": rng.choice([1, 5, 16, 33, 64, 512]),
            "max_running_requests": rng.choice([1, 3, 8]),
            "max_total_tokens": rng.choice([208, 320, 2048]) // page * page,
            "disable_radix_cache": rng.random() < 0.1,
            "enable_deterministic_inference": rng.random() < 0.2,
            "speculative_algorithm": "NGRAM" if drafts and rng.random() < 0.3 else None,
            # on the plain path
            "enable_return_routed_experts": experts and rng.random() < 0.5,
        }
        self._images = [make_image(*rng.choice(SIZES[:2]), seed=n) for n in range(4)]
        self.images: list[list[bytes]] = []

    def request(self, number: int) -> Request:
        rng = self.rng
        found = [rng.choice(self._images) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
        begin = "the same beginning"[: rng.randint(1, 18)]
        text = begin + "".join(rng.choice(["", "ab "]) + PLACE for _ in found)
        tokens = encode(self._path, text + "?" * rng.randint(1, 9), found)
        self.images.append(found)
        processor = load_image_processor(str(self._path))
        return Request(
            rid=f"r{number}",
            token_ids=list(tokens),
            prompt_len=len(tokens),
            params=SamplingParams(temperature=1.0, max_new_tokens=rng.randint(1, 20)),
            seed=number,
            return_logprob=True,
            logprob_start_len=rng.choice([-1, -1, 0]),
            images=place_images(tokens, found, processor) if found else None,
        )


def disturb(local: LocalEngine, load: Load, requests: list[Request]) -> None:
    """Abort one request, retract all, flush the prefix cache, or forget the tower's outputs."""
    engine, choice = local.engine, load.rng.random()
    if choice < 0.3:
        victim = load.rng.choice(requests)
        engine.call(lambda: engine.abort(lambda request: request is victim)).result()
    elif choice < 0.5:
        engine.call(lambda: engine.pause("retract")).result()
        engine.call(engine.resume).result()
    elif choice < 0.6:
        engine.call(engine.weights_changed).result()
    elif choice < 0.7:
        engine.call(tower_of(local).forget).result()


@pytest.mark.parametrize("seed", range(24))
def test_random_loads(models: dict[str, Path], seed: int):
    family = FAMILIES[seed % 4]
    path = models[family]
    load = Load(seed, path, experts="moe" in family, drafts="vl" in family)
    requests: list[Request] = []
    with local_engine(path, **load.options) as local:
        for number in range(24):
            requests.append(load.request(number))
            local.engine.submit(requests[-1:])
            if load.rng.random() < 0.4:
                disturb(local, load, requests)
        local.wait(requests)
        scheduler = local.engine.scheduler
        assert not scheduler.running and scheduler.pool.num_available == scheduler.pool.num_pages
    for request in requests:
        if request.finish is not None and request.finish.kind == "abort" and not request.num_output:
            request.input_log_probs, request.logprob_start_len = [], -1
    check(path, requests, load.images)
    assert sum(request.num_output for request in requests) > 24
