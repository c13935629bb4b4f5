"""Typed calls of actors: what is recorded is what is sent, and an error is logged where it happened."""

import logging
from collections import Counter

import pytest

from slime.ray.remote import _Host, _record


def test_error_of_a_call_is_logged_where_it_happened(caplog):
    host = _Host.__ray_actor_class__({}, lambda: Counter, "aab")  # as Ray makes it
    assert host.call("most_common", 1) == [("a", 2)]
    with caplog.at_level(logging.ERROR), pytest.raises(TypeError):
        host.call("most_common", "x")
    (record,) = (record for record in caplog.records if record.name == "slime.ray.remote")
    assert record.getMessage() == "most_common failed" and record.exc_info is not None


def test_error_of_the_constructor_is_raised_by_the_first_call():
    host = _Host.__ray_actor_class__({}, lambda: int, "not a number")
    with pytest.raises(ValueError, match="not a number"):
        host.call("bit_length")


def test_the_one_method_call_of_a_lambda_is_recorded():
    recorded = _record(lambda text: text.split("/", maxsplit=1))
    assert getattr("a/b/c", recorded.name)(*recorded.args, **recorded.kwargs) == ["a", "b/c"]


@pytest.mark.parametrize("method", [lambda text: "no call", lambda text: text.split])
def test_what_is_no_method_call_is_refused(method):
    with pytest.raises(TypeError, match="one method call"):
        _record(method)
