"""Recurrent states in the scheduler, with a model whose state is the text that it has seen.

Before every span the state of its row must be exactly the tokens before the span: one that was saved
elsewhere, belongs to another request, or comes too late, is another text.
"""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.algorithms.delta_layers import (
    DeltaInputs,
    DeltaState,
    continue_sequences,
    continue_tokens,
)
from slime.algorithms.gated_delta import DeltaHeads, gated_delta_net
from slime.core.errors import UserError
from slime.engine.arguments import EngineArgs
from slime.engine.kv_cache import (
    RESET,
    LayerShape,
    StateCache,
    StateShape,
    choose_sizes,
    count_states,
)
from slime.engine.radix_cache import PagePool
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams
from slime.engine.scheduler.scheduler import Scheduler

PAGE = 4
Text = tuple[int, ...]


class TextModel:
    """Runs steps; with `lag` tokens are read one step later, as on a GPU."""

    def __init__(self, *, num_pages: int, max_running: int, chunk: int, saved: int, lag: int = 0):
        self.scheduler = Scheduler(
            PagePool(num_pages, PAGE),
            max_running=max_running,
            max_pages_per_request=64,
            chunk_size=chunk,
            num_saved_states=saved,
        )
        assert self.scheduler.states is not None
        self.keeper = self.scheduler.states
        self.keeper.interval = 8
        self.states: dict[int, Text] = {}
        self.texts: dict[Request, list[int]] = {}  # tokens that are not read yet included
        self.lag = lag
        self.unread: deque[list[Request]] = deque()

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.texts[request] = list(request.token_ids)
        return request

    def step(self) -> None:
        if self.unread and self.scheduler.may_retract():
            self.read(0)
        planned = self.scheduler.schedule()
        for source, target in self.keeper.copies:
            self.states[target] = () if source == RESET else self.states[source]
        spans = [
            (request, int(start), 1, True)
            for request, start in zip(planned.decoding, planned.positions, strict=True)
        ] + [(span.request, span.start, span.count, span.samples) for span in planned.prefill]
        for request, start, count, _ in spans:
            text = self.texts[request]
            assert self.states[request.row] == tuple(text[:start]), request.rid
            self.states[request.row] = tuple(text[: start + count])
        self.scheduler.complete(planned)
        sampled = [request for request, _, _, samples in spans if samples]
        for request in sampled:
            self.texts[request].append(len(self.texts[request]) % 3)
        self.unread.append(sampled)
        self.read(self.lag if spans else 0)

    def read(self, keep: int) -> None:
        while len(self.unread) > keep:
            for request in self.unread.popleft():
                if request.finish is None:
                    request.num_pending -= 1
                    request.append(self.texts[request][len(request.token_ids)], 0.0, "v")
                    if request.finish is not None:
                        self.scheduler.finish(request)

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.add(request)
        while self.scheduler.has_requests:
            self.step()


def make_request(tokens: list[int], max_new_tokens: int = 2) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Request(rid="r", token_ids=list(tokens), prompt_len=len(tokens), params=params, seed=0)


def make_model(**options: int) -> TextModel:
    return TextModel(**{"num_pages": 64, "max_running": 4, "chunk": 64, "saved": 8, **options})


def test_a_state_is_saved_at_the_last_page_and_where_texts_part():
    model, common = make_model(), list(range(8))
    first, second, third = (make_request([*common, *[n] * 7]) for n in (50, 60, 70))
    model.run(first)
    model.run(second)  # the pages of `common` are there, but no state
    model.run(third)
    assert [request.num_cached for request in (first, second, third)] == [0, 0, 8]
    again = make_request(second.token_ids[:15])
    model.run(again)
    assert again.num_cached == 12


def test_samples_of_a_group_share_the_prompt_in_the_next_step():
    model = make_model()
    group = [make_request(list(range(14)), 9) for _ in range(3)]
    model.run(*group)
    assert [request.num_cached for request in group] == [0, 12, 12]


def test_long_prompts_are_saved_after_every_chunk():
    model = make_model(chunk=16)
    prompt = list(range(60))
    model.add(make_request(prompt))
    model.step()
    model.step()
    second = model.add(make_request(prompt))
    while model.scheduler.has_requests:
        model.step()
    assert second.num_cached >= 32


def test_the_least_recently_used_state_makes_room():
    model = make_model(saved=2)
    texts = [[n] * 6 for n in (1, 2)]
    for text in texts:
        model.run(make_request(text, 1))
    again = make_request(texts[0], 1)
    model.run(again)
    assert again.num_cached == 4
    model.run(make_request([3] * 6, 1))  # takes the row of the second text
    for text, expected in zip(texts, (4, 0), strict=True):
        request = make_request(text, 1)
        model.run(request)
        assert request.num_cached == expected


def test_flushed_states_are_not_found():
    model, prompt = make_model(), list(range(14))
    running = model.add(make_request(prompt, 20))
    for _ in range(14):
        model.step()
    model.scheduler.flush()
    while model.scheduler.has_requests:
        model.step()
    assert running.finish is not None
    later = make_request(prompt)
    model.run(later)
    assert later.num_cached == 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_random_loads(seed: int, lag: int):
    """Retraction, finished and aborted requests, flushes: every span continues its own text."""
    rng = random.Random(seed)
    sizes = {
        "num_pages": rng.randint(14, 60),
        "max_running": rng.randint(1, 6),
        "chunk": rng.randint(1, 40),
        "saved": rng.choice([0, 1, 3, 12]),
    }
    model = make_model(**sizes, lag=lag)
    pending = [
        make_request([rng.randrange(2) for _ in range(rng.randint(1, 24))], rng.randint(1, 30))
        for _ in range(40)
    ]
    for _ in range(4000):
        if pending and rng.random() < 0.3:
            model.add(pending.pop())
        choice = rng.random()
        if choice < 0.08:
            model.read(0)
            if choice < 0.02:
                model.scheduler.retract_all()
            elif choice < 0.04:
                model.scheduler.flush()
            elif model.scheduler.running:
                model.scheduler.finish(rng.choice(model.scheduler.running))
        if model.scheduler.has_requests:
            model.step()
        elif not pending:
            break
    assert not pending and not model.scheduler.has_requests
    model.scheduler.flush()
    assert model.scheduler.pool.num_free == sizes["num_pages"]
    rows = {model.keeper._pool.take() for _ in range(sizes["saved"])}
    assert rows == set(range(sizes["max_running"] + 1, sizes["max_running"] + 1 + sizes["saved"]))


# ---- the states themselves

HEADS = DeltaHeads(num_key=2, num_value=4, key_dim=8, value_dim=6)


def make_inputs(total: int) -> tuple[DeltaInputs, torch.Tensor]:
    generator = torch.Generator().manual_seed(total)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = DeltaInputs(
        mixed_qkv=normal(total, sum(HEADS.widths)),
        decay=-normal(total, HEADS.num_value).exp(),
        beta=normal(total, HEADS.num_value).sigmoid(),
    )
    return inputs, normal(sum(HEADS.widths), 4)


@pytest.mark.parametrize("cuts", [[1] * 9, [64, 1, 70], [2, 3, 130], [100, 65, 1, 1]])
def test_any_cut_gives_what_one_forward_gives(cuts: list[int]):
    """Two sequences, one cut the other way round; chunks of one token by the form for single tokens."""
    total = sum(cuts)
    pair = [make_inputs(total), make_inputs(total + 1)]
    weight = pair[0][1]
    texts = [pair[0][0], pair[1][0].map(lambda x: x[:total])]
    shape = StateShape(layers=(5,), heads=HEADS, window=3)
    cache = StateCache(shape, 3, torch.float32, torch.device("cpu"))
    cache.allocate()
    found: list[list[torch.Tensor]] = [[], []]
    done, rows = [0, 0], torch.tensor([2, 0])
    for lens in zip(cuts, reversed(cuts), strict=True):
        ends = [start + count for start, count in zip(done, lens, strict=True)]
        parts = [
            text.map(lambda x, a=a, b=b: x[a:b])
            for text, a, b in zip(texts, done, ends, strict=True)
        ]
        both = DeltaInputs(
            mixed_qkv=torch.cat([part.mixed_qkv for part in parts]),
            decay=torch.cat([part.decay for part in parts]),
            beta=torch.cat([part.beta for part in parts]),
        )
        state = cache.read(5, rows)
        if lens == (1, 1):
            out, state = continue_tokens(both, weight, HEADS, state)
        else:
            out, state = continue_sequences(both, weight, HEADS, lens, state)
        cache.write(5, rows, state)
        for index, part in enumerate(out.split(lens)):
            found[index].append(part)
        done = ends
    for text, outs in zip(texts, found, strict=True):
        whole = gated_delta_net(text.mixed_qkv, weight, text.decay, text.beta, HEADS, (total,))
        torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-4, atol=1e-5)


def test_rows_are_copied_in_order():
    shape = StateShape(layers=(0, 2), heads=HEADS, window=3)
    cache = StateCache(shape, 4, torch.bfloat16, torch.device("cpu"))
    cache.allocate()
    assert cache.windows.nbytes + cache.matrices.nbytes == 4 * shape.nbytes(torch.bfloat16)
    cache.write(
        2,
        torch.tensor([1]),
        DeltaState(
            windows=torch.full((1, 3, 56), 2.0).bfloat16(), matrices=torch.full((1, 4, 8, 6), 3.0)
        ),
    )
    cache.copy([(1, 3), (RESET, 1), (3, 0)])
    assert [float(cache.matrices[row, 1].max()) for row in range(4)] == [3, 0, 0, 3]
    assert [float(cache.windows[row, 1].max()) for row in range(4)] == [2, 0, 0, 2]
    assert not cache.matrices[:, 0].any()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # 1.9 GB, of which 0.9 are for states of 10 MB: 90, one of them for padding
        ({}, (44, 44)),
        ({"disable_radix_cache": True}, (89, 0)),
        ({"max_running_requests": 30}, (30, 30)),
        ({"max_running_requests": 80}, (80, 9)),
        ({"max_running_requests": 200}, (200, 0)),
    ],
)
def test_sizes_follow_from_memory(options: dict, expected: tuple[int, int]):
    args = EngineArgs(model_path="m", **options)
    assert count_states(args, 1.9e9, 10_000_000) == expected


def test_too_many_running_requests_for_the_states_are_refused():
    """2 GiB of a CPU: a row takes a layer's 2 MiB matrices and 3 x 48 KiB of the convolution's inputs."""
    heads = DeltaHeads(num_key=32, num_value=32, key_dim=128, value_dim=128)
    shape = StateShape(layers=(0,), heads=heads, window=3)
    row = (32 * 128 * 128 + 3 * 3 * 32 * 128) * 4
    runner: Any = SimpleNamespace(
        dtype=torch.float32,
        device=torch.device("cpu"),
        context_len=512,
        layers={1: LayerShape(num_heads=2, key_dim=64, value_dim=64)},
        tower=None,
        state_shape=shape,
    )
    page = 16 * 2 * (64 + 64) * 4
    fitting = (2**31 - page) // row - 1  # one row is for padding

    def sizes(max_running: int, **options):
        options = {"max_running_requests": max_running, **options}
        return choose_sizes(EngineArgs(model_path="m", page_size=16, **options), runner)

    found = sizes(fitting)
    assert found.max_running == fitting and found.num_pages >= 1
    with pytest.raises(UserError, match=rf"--max-running-requests {fitting + 1}: .* {fitting} req"):
        sizes(fitting + 1)
    # On a CPU 2 GiB are a default, not the memory: who sets both sizes gets them.
    given = sizes(fitting + 1, max_total_tokens=64)
    assert (given.max_running, given.num_pages) == (fitting + 1, 4)
