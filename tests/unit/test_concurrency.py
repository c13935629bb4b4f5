import threading
import time

import pytest

from slime.utils.concurrency import call_all, run_all, start_in_thread, wait_until
from slime.utils.sync_http import HttpError


def test_calls_overlap_and_results_keep_the_order_of_the_items():
    barrier = threading.Barrier(3, timeout=60)

    def meet(item: int) -> int:
        barrier.wait()  # passes only if all three are under way
        return 10 * item

    assert call_all([3, 1, 2], meet) == [30, 10, 20]
    assert call_all([], meet) == []


def test_all_calls_have_ended_when_an_error_is_raised():
    ended = []

    def work(item: int) -> None:
        if item == 0:
            raise ValueError("first")
        time.sleep(0.2)
        ended.append(item)

    with pytest.raises(ValueError, match="first"):
        call_all([0, 1, 2], work)
    assert sorted(ended) == [1, 2]


def test_several_http_errors_are_raised_as_one_with_all_messages():
    def fail(item: int) -> None:
        raise HttpError(f"engine {item} is down")

    with pytest.raises(HttpError, match=r"engine 1 is down; engine 2 is down"):
        call_all([1, 2], fail)
    with pytest.raises(HttpError, match=r"^engine 1 is down$"):
        call_all([1], fail)
    assert [str(future.exception()) for future in run_all([1, 2], fail)] == [
        "engine 1 is down",
        "engine 2 is down",
    ]


def test_a_call_in_a_thread_does_not_keep_the_process_alive():
    started, release = threading.Event(), threading.Event()

    def work() -> bool:
        started.set()
        assert threading.current_thread().daemon
        return release.wait(60)

    future = start_in_thread(work)
    assert started.wait(60) and not future.done()
    release.set()
    assert future.result(60) is True


def test_a_condition_is_polled_until_it_holds_or_time_is_up():
    polls = []

    def third() -> bool:
        polls.append(1)
        return len(polls) == 3

    assert wait_until(third, timeout_s=60, every_s=0.001) and len(polls) == 3
    assert not wait_until(lambda: False, timeout_s=0.05, every_s=0.01)
