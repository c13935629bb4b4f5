import pytest

from slime.serving.servers import flush_until_idle
from slime.utils.sync_http import HttpError
from tests.fakes import FakeEngine


@pytest.fixture
def engine():
    engine = FakeEngine({}, token="t")
    yield engine
    engine.close()


def test_a_flush_is_repeated_until_the_server_is_idle(engine):
    replies = [(400, "busy"), (400, "busy"), (200, "flushed")]
    engine.flush_cache = lambda body: replies.pop(0)
    flush_until_idle(engine.url, "t")
    assert engine.calls == ["/flush_cache"] * 3


def test_a_server_that_stays_busy_is_an_error_at_the_deadline(engine):
    engine.flush_cache = lambda body: (400, "busy")
    with pytest.raises(HttpError, match="status 400: busy"):
        flush_until_idle(engine.url, "t", 0.2)
    assert len(engine.calls) > 1


def test_other_errors_are_not_repeated(engine):
    engine.flush_cache = lambda body: (500, "broken")
    with pytest.raises(HttpError, match="status 500"):
        flush_until_idle(engine.url, "t")
    assert engine.calls == ["/flush_cache"]
