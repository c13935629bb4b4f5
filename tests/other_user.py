"""Runs a function as another user of this machine, as an attacker or a victim; needs root."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="acts as two users: needs root")


def as_user(uid: int, function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns in a forked process of that user, by way of JSON."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        reply: dict[str, Any] = {}
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            reply["value"] = function(*args)
        except BaseException:
            reply["error"] = traceback.format_exc()
        finally:
            os.write(writing, json.dumps(reply).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reply = json.loads(pipe.read())
    os.waitpid(child, 0)
    if "error" in reply:
        raise AssertionError(reply["error"])
    return reply["value"]
