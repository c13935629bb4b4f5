"""An error in an actor is in its own log, and is raised for whoever asked."""

import logging

import pytest

from slime.ray.remote import _Host


def test_error_of_a_call_is_logged_where_it_happened(caplog):
    host = _Host.__ray_actor_class__({}, "collections.Counter", "aab")  # as Ray makes it
    assert host.call("most_common", 1) == [("a", 2)]
    with caplog.at_level(logging.ERROR), pytest.raises(TypeError):
        host.call("most_common", "x")
    (record,) = (record for record in caplog.records if record.name == "slime.ray.remote")
    assert record.getMessage() == "most_common failed" and record.exc_info is not None
