"""The prefix cache against a plain dictionary of prefixes, and the page counts it must keep."""

from __future__ import annotations

import random

from slime.engine.radix_cache import PagePool, RadixCache

PAGE = 4


def test_match_returns_the_longest_inserted_prefix_in_whole_pages():
    pool = PagePool(100, PAGE)
    cache = RadixCache(pool)
    tokens = list(range(11))
    pages = pool.allocate(3)
    cache.insert(tokens, pages, num_computed=11)
    assert cache.find(tokens, limit=11).pages == pages[:2]  # the third page is not full
    assert cache.find(tokens, limit=7).pages == pages[:1]
    assert cache.find([0, 1, 2, 3, 99, 5, 6, 7], limit=8).pages == pages[:1]
    assert cache.find([9, 1, 2, 3], limit=4).pages == []


def test_equal_pages_after_different_text_are_different_entries():
    pool = PagePool(100, PAGE)
    cache = RadixCache(pool)
    first, second = [1, 1, 1, 1, 7, 7, 7, 7], [2, 2, 2, 2, 7, 7, 7, 7]
    pages = {}
    for tokens in (first, second):
        pages[tokens[0]] = pool.allocate(2)
        cache.insert(tokens, pages[tokens[0]], 8)
    assert cache.find(first, 8).pages == pages[1]
    assert cache.find(second, 8).pages == pages[2]


def test_inserting_known_text_keeps_the_page_that_is_there():
    pool = PagePool(10, PAGE)
    cache = RadixCache(pool)
    mine, yours = pool.allocate(1), pool.allocate(1)
    cache.insert([1, 2, 3, 4], mine, 4)
    cache.insert([1, 2, 3, 4], yours, 4)
    assert cache.find([1, 2, 3, 4], 4).pages == mine
    pool.release(yours)
    pool.release(mine)
    assert pool.num_free == 9 and pool.num_evictable == 1


def test_eviction_takes_the_least_recently_used_and_spares_pages_in_use():
    pool = PagePool(10, PAGE)
    cache = RadixCache(pool)
    texts = [[i] * 8 for i in range(3)]
    pages = []
    for text in texts:
        pages.append(pool.allocate(2))
        cache.insert(text, pages[-1], 8)
    pool.release(pages[0])
    pool.release(pages[1])  # the third stays in use
    cache.find(texts[0], 8)  # now the second is the oldest
    assert cache.evict(2) == 2
    assert cache.find(texts[1], 8).pages == []
    assert cache.find(texts[0], 8).pages == pages[0]
    assert cache.evict(100) == 2
    assert cache.find(texts[2], 8).pages == pages[2]


def test_clear_gives_back_everything_no_request_holds():
    pool = PagePool(10, PAGE)
    cache = RadixCache(pool)
    held, idle = pool.allocate(1), pool.allocate(1)
    cache.insert([1] * 4, held, 4)
    cache.insert([2] * 4, idle, 4)
    pool.release(idle)
    epoch = cache.epoch
    cache.clear()
    assert (pool.num_free, pool.num_evictable, len(cache)) == (9, 0, 0)
    assert cache.epoch == epoch + 1
    pool.release(held)
    assert pool.num_free == 10


def test_random_use_never_loses_or_doubles_a_page():
    rng = random.Random(0)
    pool = PagePool(40, PAGE)
    cache = RadixCache(pool)
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(2000):
        if live and rng.random() < 0.5:
            tokens, pages = live.pop(rng.randrange(len(live)))
            cache.insert(tokens, pages, len(tokens))
            pool.release(pages)
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 24))]
            prefix = cache.find(tokens, len(tokens)).pages
            pool.hold(prefix)
            missing = pool.pages_for(len(tokens)) - len(prefix)
            if missing > pool.num_available:
                pool.release(prefix)
                continue
            if missing > pool.num_free:
                cache.evict(missing - pool.num_free)
            live.append((tokens, prefix + pool.allocate(missing)))
        in_use = {page for _, pages in live for page in pages}
        assert pool.num_available == 40 - len(in_use)
        assert 0 not in in_use
    for _, pages in live:
        pool.release(pages)
    cache.clear()
    assert pool.num_free == 40
