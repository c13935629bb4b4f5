"""Signals: generation is dropped at once, a training step is finished first."""

import os
import signal

import pytest

from slime.diagnosis.exit_status import StopSignal, Terminated


@pytest.fixture
def stop_signal():
    said: list[str] = []
    stop = StopSignal(said.append)
    stop.install()
    stop.said = said
    yield stop
    stop.restore()


def test_work_that_can_be_dropped_is_dropped(stop_signal):
    with pytest.raises(Terminated), stop_signal.interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop_signal.received == signal.SIGTERM
    assert "SIGTERM" in stop_signal.said[0]


def test_other_work_goes_on_and_the_next_interruptible_part_does_not_begin(stop_signal):
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop_signal.received == signal.SIGTERM  # still here: nothing was raised
    with pytest.raises(Terminated), stop_signal.interruptible():
        pytest.fail("must not begin")


def test_a_second_interrupt_does_not_wait(stop_signal):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_closed_terminal_stops_like_sigterm_unless_it_is_ignored():
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        said: list[str] = []
        stop = StopSignal(said.append, "stopping; nothing is saved without --save")
        stop.install()
        with pytest.raises(Terminated), stop.interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert said == ["SIGHUP: stopping; nothing is saved without --save"]
        stop.restore()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        stop = StopSignal(said.append)
        stop.install()
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received is None
        stop.restore()
    finally:
        signal.signal(signal.SIGHUP, old)


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    stop = StopSignal(print)
    stop.install()
    assert signal.getsignal(signal.SIGTERM) is not before
    stop.restore()
    assert signal.getsignal(signal.SIGTERM) is before
