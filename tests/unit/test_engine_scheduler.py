"""The scheduler with a model that writes the same token forever: budgets, sharing, retraction."""

from __future__ import annotations

import random

import pytest

from slime.engine.lora.store import Adapter
from slime.engine.radix_cache import PagePool
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling_params import SamplingParams
from slime.engine.scheduler.scheduler import Scheduler
from slime.engine.scheduler.step import TokenSpan

PAGE = 4


def make_scheduler(
    num_pages: int = 64, *, max_running: int = 8, chunk_size: int = 64, cache: bool = True
):
    return Scheduler(
        PagePool(num_pages, PAGE),
        max_running=max_running,
        max_pages_per_request=64,
        chunk_size=chunk_size,
        use_prefix_cache=cache,
    )


def make_request(
    tokens: list[int], max_new_tokens: int = 4, rid: str = "r", start_len: int = -1
) -> Request:
    return Request(
        rid=rid,
        logprob_start_len=start_len,
        token_ids=list(tokens),
        prompt_len=len(tokens),
        params=SamplingParams(max_new_tokens=max_new_tokens),
        seed=0,
    )


def step(scheduler: Scheduler) -> list[TokenSpan]:
    planned = scheduler.schedule()
    works = [
        TokenSpan(request=request, start=int(start), count=1, samples=True)
        for request, start in zip(planned.decoding, planned.positions, strict=True)
    ] + planned.prefill
    for work in works:
        request = work.request
        held = len(request.pages) * PAGE
        assert work.start == request.num_computed and work.start + work.count <= held
        assert scheduler.page_table[request.row, : len(request.pages)].tolist() == request.pages
    samples = [work.request for work in works if work.samples]
    scheduler.complete(planned)
    for request in samples:
        request.num_pending -= 1
        request.append(7, 0.0, "v")
        if request.finish:
            scheduler.finish(request)
    return works


def test_prompt_is_computed_in_chunks_beside_decoding_requests():
    scheduler = make_scheduler(chunk_size=6)
    short, long = make_request([1, 2], 10), make_request(list(range(20)), 2)
    scheduler.add(short)
    scheduler.add(long)
    counts = [{work.request: work.count for work in step(scheduler)} for _ in range(5)]
    assert counts == [
        {short: 2, long: 4},
        {short: 1, long: 6},
        {short: 1, long: 6},
        {short: 1, long: 4},
        {short: 1, long: 1},
    ]


def test_second_request_with_the_same_prompt_waits_a_step_and_shares_its_pages():
    scheduler = make_scheduler()
    prompt = list(range(13))
    first, second = make_request(prompt), make_request(prompt)
    scheduler.add(first)
    scheduler.add(second)
    assert [work.request for work in step(scheduler)] == [first]
    works = {work.request: work for work in step(scheduler)}
    assert works[second].start == second.num_cached == 12
    assert second.pages[:3] == first.pages[:3]


def test_equal_prompts_with_different_adapters_start_together_and_share_nothing():
    scheduler = make_scheduler()
    adapters = [
        None,
        Adapter(name="a", slot=3, cache_key=1),
        Adapter(name="b", slot=0, cache_key=2),
    ]
    requests = [make_request(list(range(12)), 9) for _ in adapters]
    for request, adapter in zip(requests, adapters, strict=True):
        request.adapter = adapter
        scheduler.add(request)
    assert [work.count for work in step(scheduler)] == [12, 12, 12]
    assert scheduler.row_slots[[request.row for request in requests]].tolist() == [-1, 3, 0]
    again = make_request(list(range(12)))
    again.adapter = adapters[1]
    scheduler.add(again)
    step(scheduler)
    assert again.pages[:2] == requests[1].pages[:2]


def test_pages_of_an_earlier_version_of_an_adapter_do_not_come_back():
    """An update of the adapter while a request runs: its pages are of both versions."""
    scheduler = make_scheduler()
    adapter = Adapter(name="a", slot=0, cache_key=1)
    running = make_request(list(range(12)), 2)
    running.adapter = adapter
    scheduler.add(running)
    step(scheduler)
    adapter.cache_key = 2
    step(scheduler)
    assert running.finish is not None
    later = make_request(list(range(12)))
    later.adapter = adapter
    scheduler.add(later)
    step(scheduler)
    assert later.num_cached == 0


def test_equal_prompts_shorter_than_a_page_start_together():
    scheduler = make_scheduler()
    for _ in range(3):
        scheduler.add(make_request([1, 2, 3]))
    assert len(step(scheduler)) == 3


def test_without_the_prefix_cache_nothing_is_shared():
    scheduler = make_scheduler(cache=False)
    for _ in range(2):
        scheduler.add(make_request(list(range(13))))
    assert [work.start for work in step(scheduler)] == [0, 0]


def test_the_youngest_goes_back_when_pages_run_out_and_all_finish():
    scheduler = make_scheduler(num_pages=8, cache=False)
    requests = [make_request([i] * 6, 20, rid=str(i)) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    order = []
    for _ in range(300):
        step(scheduler)
        order += [r for r in requests if r.finish and r not in order]
        if len(order) == 3:
            break
    assert order == requests
    assert requests[0].num_retractions == 0 and scheduler.num_retracted > 0
    assert all(r.num_output == 20 for r in requests)
    assert scheduler.pool.num_free == 8


def test_a_retracted_request_computes_prompt_and_output_again():
    scheduler = make_scheduler(cache=False)
    request = make_request([1, 2, 3, 4, 5], 10)
    scheduler.add(request)
    for _ in range(3):
        step(scheduler)
    scheduler.retract_all()
    assert request.num_output == 3 and request.num_computed == 0 and not request.pages
    (work,) = step(scheduler)
    assert (work.start, work.count) == (0, 8)


def test_finishing_a_waiting_request_takes_it_out():
    scheduler = make_scheduler(max_running=1)
    first, second = make_request([1]), make_request([2])
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    scheduler.finish(second)
    assert list(scheduler.waiting) == []


def test_pages_filled_before_a_flush_do_not_come_back():
    scheduler = make_scheduler()
    request = make_request(list(range(9)), 1)
    scheduler.add(request)
    planned = scheduler.schedule()
    scheduler.flush()  # the weights changed under the running request
    scheduler.complete(planned)
    scheduler.finish(request)
    assert scheduler.cache.find(list(range(9)), 8).pages == []
    assert scheduler.pool.num_free == 64


def test_pages_computed_twice_do_not_bar_the_way_to_those_before_them():
    """The scored prompt computes its first page again though the cache has it; all six are needed."""
    scheduler = make_scheduler(num_pages=6, chunk_size=8)
    known = make_request([1] * 5, 1)
    scored = make_request([1] * 4 + [2] * 8, 12, start_len=0)
    scheduler.add(known)
    step(scheduler)
    scheduler.add(scored)
    for _ in range(14):
        if not scored.finish:
            step(scheduler)
    assert known.finish and scored.finish and scored.num_output == 12


def test_prompts_that_are_scored_do_not_wait_for_each_other():
    """Each computes its whole prompt, so there is nothing to share and all fit into one step."""
    scheduler = make_scheduler(chunk_size=64)
    for _ in range(4):
        scheduler.add(make_request([1] * 9, start_len=0))
    assert [work.count for work in step(scheduler)] == [9] * 4


def test_a_full_cache_is_walked_once_for_many_pages():
    """4,000 pages of old texts; decoding on takes a page every 4 steps and should not search for each."""
    scheduler = make_scheduler(num_pages=4002, max_running=1, chunk_size=400)
    for text in range(80):
        scheduler.add(make_request([text] * 200, 1))
        while scheduler.has_requests:
            step(scheduler)
    scheduler.add(make_request([90] * 9, 30))
    step(scheduler)
    assert scheduler.pool.num_free >= 4000 // 32 - 3


@pytest.mark.parametrize("seed", range(5))
def test_random_loads_finish_and_give_back_every_page(seed: int):
    rng = random.Random(seed)
    scheduler = make_scheduler(
        num_pages=rng.randint(12, 40), max_running=rng.randint(1, 8), chunk_size=rng.randint(1, 40)
    )
    requests = [
        make_request(
            [rng.randrange(2) for _ in range(rng.randint(1, 30))],
            rng.randint(1, 16),
            start_len=rng.choice([-1, 0, 5]),
        )
        for _ in range(40)
    ]
    pending = list(requests)
    for _ in range(5000):
        if pending and rng.random() < 0.3:
            scheduler.add(pending.pop())
        if rng.random() < 0.02:
            scheduler.retract_all()
        if scheduler.has_requests:
            works = step(scheduler)
            assert works, "a step without work"
            assert len(scheduler.running) <= len(scheduler.page_table)
        elif not pending:
            break
    assert all(request.finish for request in requests)
    scheduler.flush()
    assert scheduler.pool.num_free == scheduler.pool.num_pages
