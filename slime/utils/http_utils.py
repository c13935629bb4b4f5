"""Public import path of `post` and `get` of `slime.compat.http_calls`."""

from slime.compat.http_calls import get, post

__all__ = ["get", "post"]
