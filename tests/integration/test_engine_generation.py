"""Tokens and log-probs of the engine against Hugging Face, under every way a request may be cut up."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engines import local_engine
from tests.tiny import make_tiny_checkpoint

TOLERANCE = 1e-4
FAMILIES = ["qwen3", "llama", "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"))


def make_prompts(count: int, longest: int = 100, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


class Reference:
    """Hugging Face's own generate and forward. The same is asked of it for every option of the engine."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._generate = functools.cache(self._generate)
        self._log_probs = functools.cache(self._log_probs)

    def greedy(self, ids: list[int], max_new_tokens: int) -> list[int]:
        return self._generate(tuple(ids), max_new_tokens)

    def log_probs(self, tokens: list[int], temperature: float = 1.0) -> list[float]:
        """Of tokens 1, 2, ... given those before."""
        return self._log_probs(tuple(tokens), temperature)

    @torch.no_grad()
    def _generate(self, ids: tuple[int, ...], max_new_tokens: int) -> list[int]:
        prompt = torch.tensor([ids])
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        return out[0, len(ids) :].tolist()

    @torch.no_grad()
    def _log_probs(self, tokens: tuple[int, ...], temperature: float) -> list[float]:
        logits = self.model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
        return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].tolist()


reference_of = functools.lru_cache(maxsize=1)(Reference)


def check(reference: Reference, prompts, requests, max_new_tokens: int) -> None:
    for ids, request in zip(prompts, requests, strict=True):
        assert request.output_ids == reference.greedy(ids, max_new_tokens)
        expected = reference.log_probs(request.token_ids)[len(ids) - 1 :]
        assert request.output_log_probs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1},
        {"disable_radix_cache": True, "chunked_prefill_size": 7},
        {"max_total_tokens": 256, "page_size": 8, "chunked_prefill_size": 24},
        {"enable_deterministic_inference": True},
    ],
    ids=["plain", "page1", "chunked", "full cache", "deterministic"],
)
def test_greedy_output_is_hugging_faces(checkpoint: Path, options: dict):
    prompts = make_prompts(12)
    with local_engine(checkpoint, **options) as engine:
        first = engine.generate(prompts, temperature=0, max_new_tokens=40)
        again = engine.generate(prompts, temperature=0, max_new_tokens=40)
    reference = reference_of(checkpoint)
    check(reference, prompts, first, 40)
    check(reference, prompts, again, 40)
    if not options:
        assert sum(r.num_cached for r in first) == 0
        # whole pages of the prompt, but never its last token
        assert [r.num_cached for r in again] == [(len(p) - 1) // 16 * 16 for p in prompts]
    if "max_total_tokens" in options:
        assert sum(r.num_retractions for r in first + again) > 0


def test_requests_of_one_prompt_share_its_pages(qwen3: Path):
    prompt = make_prompts(1, longest=200, seed=3)[0] * 3
    with local_engine(qwen3) as engine:
        requests = engine.generate([prompt] * 6, temperature=0, max_new_tokens=8)
    shared = (len(prompt) - 1) // 16 * 16
    assert sorted(r.num_cached for r in requests) == [0] + [shared] * 5
    check(reference_of(qwen3), [prompt] * 6, requests, 8)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_samples_are_of_the_scaled_distribution(qwen3: Path, temperature: float):
    prompts = make_prompts(6)
    with local_engine(qwen3) as engine:
        requests = engine.generate(prompts, temperature=temperature, top_p=0.9, max_new_tokens=20)
    reference = reference_of(qwen3)
    for request in requests:
        expected = reference.log_probs(request.token_ids, temperature)[request.prompt_len - 1 :]
        assert request.output_log_probs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    "options", [{}, {"chunked_prefill_size": 5}, {"enable_deterministic_inference": True}]
)
@pytest.mark.parametrize("start_len", [0, 20])
def test_prompt_log_probs(qwen3: Path, options: dict, start_len: int):
    prompts = [p for p in make_prompts(12) if len(p) > 30]
    with local_engine(qwen3, **options) as engine:
        engine.generate(prompts, temperature=0, max_new_tokens=1)  # fills the prefix cache
        requests = engine.generate(prompts, start_len=start_len, temperature=0, max_new_tokens=4)
    reference = reference_of(qwen3)
    for request in requests:
        expected = reference.log_probs(request.token_ids[: request.prompt_len])[start_len:]
        assert request.input_log_probs == pytest.approx(expected, abs=TOLERANCE)
        assert request.num_cached <= start_len


def test_same_seed_and_prompt_give_the_same_tokens_in_any_company(qwen3: Path):
    prompts = make_prompts(10)
    with local_engine(qwen3) as engine:
        together = engine.generate(prompts, seeds=[7] * 10, max_new_tokens=20)
        alone = [engine.generate([p], seeds=[7], max_new_tokens=20)[0] for p in prompts]
        other = engine.generate(prompts[:1], seeds=[8], max_new_tokens=20)[0]
    assert [r.output_ids for r in together] == [r.output_ids for r in alone]
    assert other.output_ids != alone[0].output_ids


def test_a_request_continued_from_its_partial_output_samples_the_same_tokens(qwen3: Path):
    prompt = make_prompts(1)[0]
    with local_engine(qwen3) as engine:
        whole = engine.generate([prompt], seeds=[3], max_new_tokens=30, ignore_eos=True)[0]
        rest = engine.generate(
            [whole.token_ids[: len(prompt) + 11]], seeds=[3], max_new_tokens=19, ignore_eos=True
        )[0]
    assert rest.output_ids == whole.output_ids[11:]


def test_sliding_window_layers(tmp_path: Path):
    path = make_tiny_checkpoint(
        tmp_path / "m",
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )
    prompts = make_prompts(6)
    with local_engine(path) as engine:
        requests = engine.generate(prompts, temperature=0, max_new_tokens=20)
    check(reference_of(path), prompts, requests, 20)


def test_dtype_option_overrides_the_checkpoints(tmp_path: Path):
    path = make_tiny_checkpoint(tmp_path / "m", dtype=torch.bfloat16)
    prompts = make_prompts(3)
    with local_engine(path, dtype="float32") as engine:
        requests = engine.generate(prompts, temperature=0, max_new_tokens=8)
    check(reference_of(path), prompts, requests, 8)
