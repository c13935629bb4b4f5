"""Draft tokens by prompt lookup: their source, which samples are accepted, and the unchanged distribution."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

from slime.core.errors import ConfigError
from slime.engine.arguments import parse_engine_args
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling import sample
from slime.engine.scheduler.sampling_params import SamplingParams
from slime.engine.scheduler.speculation import Drafter, DraftHistory, accept_drafts
from slime.engine.scheduler.step import StepOutput
from tests.args import make_args


def make_request(tokens: list[int], seed: int = 0, **params: object) -> Request:
    return Request(
        rid="r",
        token_ids=list(tokens),
        prompt_len=len(tokens),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=seed,
    )


def find_slowly(text: list[int]) -> int | None:
    for size in (4, 3, 2):
        ends = [e for e in range(size, len(text)) if text[e - size : e] == text[-size:]]
        if size <= len(text) and ends:
            return max(ends)
    return None


def test_the_latest_longest_match_is_found_however_the_text_grew():
    rng = random.Random(0)
    for _ in range(200):
        history, text = DraftHistory(), [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        while len(text) < 40:
            assert history.find(text) == find_slowly(text), text
            text += [rng.randrange(3) for _ in range(rng.randint(1, 3))]


@pytest.mark.parametrize(
    ("text", "most", "draft"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
        ([1, 2, 3, 9, 1, 2], 1, [3]),
        ([7, 7, 7], 5, [7, 7, 7, 7, 7]),  # goes on past the end of the text
        ([1, 2, 3], 5, []),
        ([1, 2, 3, 9, 1, 2], 0, []),
    ],
)
def test_a_draft_is_what_followed_before(text: list[int], most: int, draft: list[int]):
    assert Drafter(12).draft(make_request(text), most) == draft


def test_a_draft_keeps_to_the_window_and_shrinks_when_it_was_wrong():
    request, drafter = make_request([7] * 5), Drafter(9)
    assert len(drafter.draft(request, 100)) == 8
    assert request.draft_history is not None
    request.draft_history.count(8, 3)
    assert len(drafter.draft(request, 100)) == 3
    request.draft_history.count(3, 3)
    assert len(drafter.draft(request, 100)) == 6


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.1}, {"min_new_tokens": 3}, {"logit_bias": {1: 2.0}}]
)
def test_no_draft_if_sampling_depends_on_the_tokens_before(params: dict):
    assert Drafter(12).draft(make_request([7] * 5, **params), 8) == []


def test_samples_after_a_rejected_draft_token_are_dropped():
    a, b, c = (make_request([1]) for _ in range(3))
    for request in (a, b):
        request.draft_history = DraftHistory()
    output = StepOutput(
        requests=[a, a, a, b, c, b],
        tokens=[5, 6, 7, 1, 8, 2],
        log_probs=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        scored=[],
    )
    kept = accept_drafts(output, {a: [5, 9], b: [1]})
    assert list(zip(kept.requests, kept.tokens, kept.log_probs, strict=True)) == [
        (a, 5, 0.1),
        (a, 6, 0.2),
        (b, 1, 0.4),
        (c, 8, 0.5),
        (b, 2, 0.6),
    ]
    assert a.draft_history is not None and b.draft_history is not None
    assert (a.draft_history.num_proposed, a.draft_history.num_correct) == (2, 1)
    assert (b.draft_history.num_proposed, b.draft_history.num_correct) == (1, 1)


def test_the_distribution_is_the_models_own():
    """A chain over three tokens: the frequency of every text of three new tokens against its product
    of transition probabilities."""
    chain = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.4, 0.1]])
    prompt, new, count = [0, 1, 2, 0, 1], 3, 1500
    texts: Counter[tuple[int, ...]] = Counter()
    forwards = 0
    for seed in range(count):
        request, drafter = make_request(prompt, seed), Drafter(4)
        while request.num_output < new:
            draft = drafter.draft(request, new - request.num_output - 1)
            text = request.token_ids + draft
            rows = list(range(len(request.token_ids) - 1, len(text)))
            logits = chain[torch.tensor([text[i] for i in rows])].log()
            sampled = sample(logits, [request] * len(rows), np.array(rows) + 1)
            output = StepOutput(
                requests=[request] * len(rows),
                tokens=sampled.tokens,
                log_probs=sampled.log_probs,
                scored=[],
            )
            request.token_ids += accept_drafts(output, {request: draft}).tokens
            forwards += 1
        texts[tuple(request.output_ids)] += 1
    for text in itertools.product(range(3), repeat=new):
        steps = zip([prompt[-1], *text], text, strict=False)
        expected = math.prod(float(chain[a, b]) for a, b in steps)
        spread = math.sqrt(expected * (1 - expected) / count)
        assert abs(texts[text] / count - expected) < 4.5 * spread, text
    assert forwards < 0.9 * new * count  # enough draft tokens were accepted to matter


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--speculative-algorithm", "EAGLE"], "NGRAM"),
        (["--speculative-num-draft-tokens", "1"], "between 2 and 128"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(options: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        parse_engine_args(["--model-path", "m", *options])


def test_a_run_refuses_drafts_by_a_model_before_anything_starts():
    assert make_args(sglang_speculative_algorithm="ngram").sglang_speculative_algorithm == "ngram"
    with pytest.raises(ConfigError, match="--sglang-speculative-algorithm EAGLE"):
        make_args(sglang_speculative_algorithm="EAGLE")
